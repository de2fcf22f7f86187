"""Stores on disk: round trips, damage, foreign files, killed writers, other processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES
from digits_corpus import small

import contrastive_curvature as cc

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


@pytest.mark.parametrize(("index", "names"), [("flat", True), ("hnsw", False), ("ivf", False)])
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


def test_damaged_faiss_files_are_refused(device, tmp_path):
    path = tmp_path / "corpus"
    filled_faiss("ivf").save(path)
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


def test_files_that_cannot_be_read_or_written(device, tmp_path):
    with pytest.raises(cc.InputError, match="no such file"):
        cc.FaissStore.load(tmp_path / "nothing")
    with pytest.raises(cc.InputError, match="save: expected embeddings in the store"):
        cc.FaissStore().save(tmp_path / "corpus")
    with pytest.raises(cc.InputError, match="a file in a folder that exists"):
        filled_faiss().save(tmp_path / "no" / "corpus")


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


def test_lance_folders_that_are_none(device, tmp_path):
    import lancedb
    import pyarrow

    with pytest.raises(cc.InputError, match=r"corpus.lance: expected a table that LanceStore made, got no such folder"):
        cc.LanceStore.open(tmp_path / "corpus.lance")
    assert os.listdir(tmp_path) == []
    with pytest.raises(cc.InputError, match=r"path: expected a folder NAME\.lance"):
        cc.LanceStore(tmp_path / "corpus")
    with pytest.raises(cc.InputError, match="a folder whose parent exists"):
        cc.LanceStore(tmp_path / "no" / "corpus.lance")
    filled_lance(tmp_path)
    with pytest.raises(cc.InputError, match=r"does not exist yet, got one that does. LanceStore.open"):
        cc.LanceStore(tmp_path / "corpus.lance")
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


def test_a_forked_process_is_refused(device, tmp_path, monkeypatch):
    """LanceDB's threads do not survive a fork: some children crash or stand still."""
    store = filled_lance(tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(cc.UnsupportedError, match=r"got a forked one\. Start workers with 'spawn'"):
        store.search(torch.ones(3, 8, device=device), 2)
    with pytest.raises(cc.UnsupportedError, match="got a forked one"):
        cc.LanceStore.open(tmp_path / "corpus.lance")
