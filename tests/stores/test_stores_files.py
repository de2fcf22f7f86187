"""Stores on disk: round trips, damage, foreign files, killed writers, other processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fresh
import numpy as np
import pytest
import torch
from devices import DEVICES
from digits_corpus import small
from safetensors import safe_open
from safetensors.numpy import save_file

import contrastive_curvature as cc
from contrastive_curvature import artifact

pytestmark = pytest.mark.parametrize("device", DEVICES)

N = 400


def filled_faiss(index: str = "flat", names: bool = False) -> cc.FaissStore:
    store = cc.FaissStore()
    ids: Any = [f"é{i}" for i in range(N)] if names else range(5, N + 5)
    store.add(ids, small(N))
    store.create_index(index)
    return store


def check_same(one: Any, other: Any, device: str) -> None:
    queries = small(20, seed=3)[0].to(device)
    a, b = one.search(queries, 7, max_uncertainty=0.5), other.search(queries, 7, max_uncertainty=0.5)
    for name in ("cosine", "kappa", "uncertainty", "vectors"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert a.ids.tolist() == b.ids.tolist()
    assert len(one) == len(other) == N
    assert one.index == other.index


@pytest.mark.parametrize("index", ["flat", "hnsw", "ivf"])
@pytest.mark.parametrize("names", [False, True])
def test_faiss_round_trip(device, index, names, tmp_path):
    store = filled_faiss(index, names)
    store.save(tmp_path / "corpus")
    again = cc.FaissStore.load(tmp_path / "corpus")
    check_same(store, again, device)
    # What was loaded goes on: duplicates are known, and new embeddings are found.
    with pytest.raises(cc.InputError, match="not in the store yet"):
        again.add(["é3"] if names else [7], small(1))
    again.add(["new"] if names else [1000], small(1, seed=9))
    assert again.search(small(1, seed=9)[0].to(device), 1).ids.tolist() == [["new" if names else 1000]]


def test_faiss_file_is_plain_safetensors(device, tmp_path):
    filled_faiss().save(tmp_path / "corpus")
    with safe_open(str(tmp_path / "corpus"), framework="numpy") as file:
        assert set(file.keys()) == {"id", "kappa", "uncertainty", "vector"}
        assert np.array_equal(file.get_tensor("id"), np.arange(5, N + 5))
        expected = torch.nn.functional.normalize(small(N)[0], dim=1).numpy()
        np.testing.assert_allclose(file.get_tensor("vector"), expected, atol=1e-7)


@pytest.mark.parametrize("index", ["flat", "ivf"])
def test_damaged_faiss_files_are_refused(device, index, tmp_path):
    path = tmp_path / "corpus"
    filled_faiss(index).save(path)
    whole = path.read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(cc.InputError, match=r"corpus: expected a file that FaissStore.save wrote, got a damaged"):
            cc.FaissStore.load(path)
    start = 8 + int.from_bytes(whole[:8], "little")
    for place in (start, (start + len(whole)) // 2, len(whole) - 1):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(cc.InputError, match="got a damaged one: its checksum is another"):
            cc.FaissStore.load(path)


def test_foreign_files_are_refused(device, tmp_path):
    path = tmp_path / "other"
    for content in (b"\x80\x04\x95hello", b"{}" * 50):
        path.write_bytes(content)
        with pytest.raises(cc.InputError, match=r"other: expected a file that FaissStore\.save wrote"):
            cc.FaissStore.load(path)
    save_file({"x": np.ones(3)}, path)
    with pytest.raises(cc.InputError, match="a safetensors file of something else"):
        cc.FaissStore.load(path)
    with pytest.raises(cc.InputError, match="no such file"):
        cc.FaissStore.load(tmp_path / "nothing")
    with pytest.raises(cc.InputError, match="no such file"):
        cc.FaissStore.load(tmp_path)


def test_a_newer_version_is_refused(device, tmp_path, monkeypatch):
    path = tmp_path / "corpus"
    with monkeypatch.context() as patch:
        patch.setattr(artifact, "VERSION", artifact.VERSION + 1)
        filled_faiss().save(path)
        filled_lance(tmp_path)
    for load in (lambda: cc.FaissStore.load(path), lambda: cc.LanceStore.open(tmp_path / "corpus.lance")):
        with pytest.raises(cc.InputError, match=rf"corpus.* of version {artifact.VERSION}, got version"):
            load()


def test_an_interrupted_save_leaves_the_old_file(device, tmp_path, monkeypatch):
    path = tmp_path / "corpus"
    filled_faiss().save(path)
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        filled_faiss("hnsw").save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["corpus"]


def test_saving_where_nothing_can_be_written(device, tmp_path):
    with pytest.raises(cc.InputError, match="save: expected embeddings in the store"):
        cc.FaissStore().save(tmp_path / "corpus")
    with pytest.raises(cc.InputError, match="a file in a folder that exists"):
        filled_faiss().save(tmp_path / "no" / "corpus")


AMONG_TENSORS = """
import json
import faiss.contrib.torch_utils
import torch
import contrastive_curvature as cc
torch.set_num_threads(1)
vectors = torch.nn.functional.normalize(torch.randn(400, 8), dim=1)
store = cc.FaissStore()
store.add(range(400), (vectors, torch.ones(400), torch.linspace(0, 1, 400)))
found = []
for kind in ("hnsw", "ivf", "flat"):
    store.create_index(kind)
    for most in (1.0, 0.05):
        store.save(PLACE)
        found.append(cc.FaissStore.load(PLACE).search(vectors[3:4], 2, max_uncertainty=most).ids[0, 0].item())
store.delete([3])
print(json.dumps([found, len(store)]))
"""


def test_faiss_may_have_been_told_to_give_tensors(device, tmp_path):
    """As pytorch-metric-learning does."""
    script = AMONG_TENSORS.replace("PLACE", repr(str(tmp_path / "corpus")))
    assert fresh.run(script)[0] == [[3] * 6, 399]


def filled_lance(folder: Path) -> cc.LanceStore:
    store = cc.LanceStore(folder / "corpus.lance")
    store.add(range(5, N + 5), small(N), payload={"label": torch.arange(N) % 3, "name": [f"n{i}" for i in range(N)]})
    return store


@pytest.mark.parametrize("index", ["flat", "ivf_pq"])
def test_lance_round_trip(device, index, tmp_path):
    store = filled_lance(tmp_path)
    store.create_index(index)
    again = cc.LanceStore.open(str(tmp_path / "corpus.lance"))
    check_same(store, again, device)
    again.optimize()
    result = again.search(small(4)[0].to(device), 1, where="name = 'n2' OR label = 1")
    assert result.payload["name"][2, 0] == "n2"
    with pytest.raises(cc.InputError, match="not in the store yet"):
        again.add([7], small(1), payload={"label": [0], "name": ["x"]})


def test_lance_table_is_plain(device, tmp_path):
    import lancedb

    filled_lance(tmp_path)
    table = lancedb.connect(str(tmp_path)).open_table("corpus").to_arrow()
    assert table.column_names == ["id", "vector", "kappa", "uncertainty", "label", "name"]
    assert table.column("id").to_pylist() == list(range(5, N + 5))


def test_lance_folders_that_are_none(device, tmp_path):
    import lancedb
    import pyarrow

    with pytest.raises(cc.InputError, match=r"corpus.lance: expected a table that LanceStore made, got no such folder"):
        cc.LanceStore.open(tmp_path / "corpus.lance")
    assert os.listdir(tmp_path) == []
    with pytest.raises(cc.InputError, match=r"path: expected a folder NAME\.lance"):
        cc.LanceStore(tmp_path / "corpus")
    with pytest.raises(cc.InputError, match=r"path: expected a folder NAME\.lance"):
        cc.LanceStore(tmp_path / "a b.lance")
    with pytest.raises(cc.InputError, match="a folder whose parent exists"):
        cc.LanceStore(tmp_path / "no" / "corpus.lance")
    filled_lance(tmp_path)
    with pytest.raises(cc.InputError, match=r"does not exist yet, got one that does. LanceStore.open"):
        cc.LanceStore(tmp_path / "corpus.lance")
    (tmp_path / "empty.lance").mkdir()
    with pytest.raises(cc.InputError, match=r"empty.lance: expected a table that LanceStore made"):
        cc.LanceStore.open(tmp_path / "empty.lance")
    lancedb.connect(str(tmp_path)).create_table("other", pyarrow.table({"id": [1, 2]}))
    with pytest.raises(cc.InputError, match="got something else"):
        cc.LanceStore.open(tmp_path / "other.lance")


def test_damaged_lance_folders_are_refused(device, tmp_path):
    filled_lance(tmp_path)
    (data,) = (tmp_path / "corpus.lance" / "data").iterdir()
    data.write_bytes(data.read_bytes()[:100])
    again = cc.LanceStore.open(tmp_path / "corpus.lance")
    with pytest.raises(cc.InputError, match=r"corpus.lance: expected a table .* damaged or missing"):
        again.search(torch.ones(1, 8, device=device), 3)
    for manifest in (tmp_path / "corpus.lance" / "_versions").iterdir():
        manifest.write_bytes(b"")
    with pytest.raises(cc.InputError, match=r"corpus.lance: expected a table"):
        cc.LanceStore.open(tmp_path / "corpus.lance")


FORKED = """
import json, os, sys, warnings
warnings.filterwarnings("ignore", "lancedb fork support", RuntimeWarning)
warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
import torch
import contrastive_curvature as cc
torch.set_num_threads(1)
cc.FaissStore, cc.LanceStore, cc.SearchResult, cc.StoredEmbeddings
early = [name for name in ("faiss", "lancedb", "pyarrow", "lance") if name in sys.modules]
store = cc.LanceStore.open(PLACE)
found = store.search(torch.ones(3, 8), 2).ids.tolist()
read, write = os.pipe()
child = os.fork()
if child == 0:
    refused = []
    for use in (lambda: store.search(torch.ones(3, 8), 2), lambda: len(store), lambda: cc.LanceStore.open(PLACE)):
        try:
            use()
        except cc.UnsupportedError as error:
            refused.append(str(error))
    os.write(write, json.dumps(refused).encode())
    os._exit(0)
os.close(write)
refused = json.loads(os.read(read, 10000))
print(json.dumps([early, found, refused, os.waitpid(child, 0)[1], len(store)]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_another_process_imports_lancedb_late_searches_refuses_to_fork_and_ends(device, tmp_path):
    found = filled_lance(tmp_path).search(torch.ones(3, 8, device=device), 2).ids.tolist()
    script = FORKED.replace("PLACE", repr(str(tmp_path / "corpus.lance")))
    early, theirs, refused, status, size = fresh.run(script)[0]
    assert early == []
    assert theirs == found
    assert len(refused) == 3
    assert all("got a forked one. Start workers with 'spawn'" in text for text in refused)
    assert (status, size) == (0, N)
