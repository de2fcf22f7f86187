"""Searches in real indices of FAISS and tables of LanceDB, against all cosines in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tables import each
from torch import Tensor

import contrastive_curvature as cc

faiss = pytest.importorskip("faiss")
lancedb = pytest.importorskip("lancedb")

N, DIM = 500, 8
KINDS = ("FlatIP", "FlatL2", "HNSW", "IVF", "Lance", "Lance, IVF_PQ")


def vectors() -> Tensor:
    return torch.nn.functional.normalize(torch.randn(N, DIM, generator=torch.Generator().manual_seed(0)), dim=1)


def asked(n: int, device: str) -> Tensor:
    """Queries of any norm."""
    return 3 * torch.randn(n, DIM, generator=torch.Generator().manual_seed(1)).to(device)


def table(folder: Path, **columns: list[Any]) -> Any:
    rows = [{"id": row, "vector": vector, "label": row % 4} for row, vector in enumerate(vectors().numpy())]
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return lancedb.connect(folder).create_table("corpus", rows)


def make_index(kind: str, folder: Path) -> cc.Index:
    if kind.startswith("Lance"):
        made = table(folder)
        if kind == "Lance, IVF_PQ":
            config = lancedb.index.IvfPq(distance_type="cosine", num_partitions=1, num_sub_vectors=DIM)
            made.create_index("vector", config=config)
        return cc.LanceIndex(made)
    inner = faiss.METRIC_INNER_PRODUCT
    index = {
        "FlatIP": lambda: faiss.IndexFlatIP(DIM),
        "FlatL2": lambda: faiss.IndexFlatL2(DIM),
        "HNSW": lambda: faiss.IndexHNSWFlat(DIM, 32, inner),
        "IVF": lambda: faiss.index_factory(DIM, "IVF4,Flat", inner),
    }[kind]()
    index.train(vectors().numpy())
    index.add(vectors().numpy())
    if kind == "IVF":
        index.nprobe = 4  # all
    if kind == "HNSW":
        index.hnsw.efSearch = 300
    return cc.FaissIndex(index)


@each("kind", KINDS)
@each("n", [1, 150])
def test_the_nearest_are_those_of_the_largest_cosines(device: str, kind: str, n: int, tmp_path: Path) -> None:
    queries = asked(n, device)
    cosine = torch.nn.functional.normalize(queries.cpu().double(), dim=1) @ vectors().double().T
    best = cosine.topk(10)
    distances, ids = make_index(kind, tmp_path / f"{kind}{n}").search(queries, 10)
    assert distances.device.type == ids.device.type == device
    rows = torch.as_tensor(ids).cpu()
    assert rows.shape == distances.shape == (n, 10)
    assert bool((distances.diff(dim=1) >= 0).all())
    if kind == "Lance, IVF_PQ":  # its distances are those of compressed vectors
        assert float((rows.unsqueeze(2) == best.indices.unsqueeze(1)).any(2).double().mean()) > 0.7
        return
    torch.testing.assert_close(cosine.gather(1, rows), best.values, rtol=0, atol=1e-6)
    torch.testing.assert_close(1 - distances.cpu().double(), best.values, rtol=0, atol=1e-6)


def test_identifiers_are_those_of_the_user(device: str, tmp_path: Path) -> None:
    names = [f"image-{row}.jpg" for row in range(N)]
    index = faiss.IndexFlatIP(DIM)
    index.add(vectors().numpy())
    queries = asked(7, device)
    rows = torch.as_tensor(cc.FaissIndex(index).search(queries, 3)[1]).cpu()
    for found in (cc.FaissIndex(index, names), cc.LanceIndex(table(tmp_path, name=names), "name")):
        assert found.search(queries, 3)[1].tolist() == [[names[row] for row in hits] for hits in rows.tolist()]
    numbers = torch.arange(N) + 1000
    assert torch.equal(torch.as_tensor(cc.FaissIndex(index, numbers).search(queries, 3)[1]).cpu(), rows + 1000)


def test_a_condition_of_lance_comes_before_the_search(device: str, tmp_path: Path) -> None:
    queries, made = asked(7, device), table(tmp_path)
    cosine = torch.nn.functional.normalize(queries.cpu(), dim=1) @ vectors()[3::4].T
    ids = torch.as_tensor(cc.LanceIndex(made, where="label = 3").search(queries, 5)[1]).cpu()
    assert torch.equal(ids, 4 * cosine.topk(5).indices + 3)
    with pytest.raises(cc.InputError, match=r"where: expected a condition in SQL, got 'lab = 3'"):
        cc.LanceIndex(made, where="lab = 3").search(queries, 5)
    with pytest.raises(cc.InputError, match="k: expected at most 3, the hits of the table, got 4"):
        cc.LanceIndex(made, where="id < 3").search(queries, 4)


def test_what_is_refused(device: str, tmp_path: Path) -> None:
    queries, index, made = asked(3, device), faiss.IndexFlatIP(DIM), table(tmp_path)
    index.add(vectors().numpy())
    raw, other = faiss.IndexFlatL2(DIM), faiss.IndexFlat(DIM, faiss.METRIC_L1)
    raw.add(7 * vectors().numpy())
    own = faiss.IndexIDMap(faiss.IndexFlatIP(DIM))
    own.add_with_ids(vectors().numpy(), torch.arange(1000, 1000 + N).numpy())
    assert int(torch.as_tensor(cc.FaissIndex(own).search(queries, 1)[1]).min()) >= 1000
    for call, message in (
        (lambda: cc.FaissIndex(own, range(N)), "ids: expected None for an index that has identifiers of its own"),
        (lambda: cc.FaissIndex(made), "index: expected an index of FAISS, got a LanceTable"),
        (lambda: cc.FaissIndex(other), "index: expected an index of inner products or Euclidean distances"),
        (lambda: cc.FaissIndex(index, ["one"]), "ids: expected 500, one for each vector of the index, got 1"),
        (lambda: cc.FaissIndex(raw).search(queries, 2), r"index: expected unit vectors in it.*la\(x\)\.mu"),
        (lambda: cc.FaissIndex(index).search(queries, N + 1), r"k: expected at most 500.*nprobe"),
        (lambda: cc.LanceIndex(index), "table: expected a table of LanceDB, got a IndexFlatIP"),
        (lambda: cc.LanceIndex(made, "name"), "ids: expected one of 'id', 'vector', 'label', got name"),
        (lambda: cc.LanceIndex(made, vectors="mu"), "vectors: expected one of"),
        (lambda: cc.LanceIndex(made).search(queries, N + 1), "k: expected at most 500, the hits of the table"),
    ):
        with pytest.raises(cc.InputError, match=message):
            call()
    for found in (cc.FaissIndex(index), cc.LanceIndex(made)):
        for wrong, k, message in (
            (queries, 0, "k: expected a positive whole number"),
            (queries[:, :3], 2, "vectors: expected D = 8, that of the index, got D = 3"),
            (queries[0], 2, r"vectors: expected shape \(N, D\)"),
            (0 * queries, 2, "vectors: expected non-zero rows"),
        ):
            with pytest.raises(cc.InputError, match=message):
                found.search(wrong, k)
