"""What stores refuse, in words, and that a refused call changes nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devices import DEVICES
from digits_corpus import STORES, make_store, small
from tables import each

import contrastive_curvature as cc

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = make_store(request.param, tmp_path)
    made.add(range(40), small())
    return made


def damaged(part: int, value: float) -> tuple[torch.Tensor, ...]:
    parts = [t.clone() for t in small(3, seed=1)]
    parts[part][1] = value
    return tuple(parts)


ADDITIONS = [
    ({"embeddings": damaged(0, float("nan"))}, "mu: expected finite"),
    ({"embeddings": damaged(0, 0.0)}, "mu: expected non-zero rows"),
    ({"embeddings": damaged(1, -1.0)}, "kappa: expected numbers >= 0 .* got -1 to"),
    ({"embeddings": damaged(2, -0.5)}, "uncertainty: expected numbers >= 0"),
    ({"embeddings": torch.ones(3, 8)}, "embeddings: expected an EmbeddingDistribution"),
    ({"embeddings": small(3, 7)}, "embeddings: expected D = 8, that of the store, got D = 7"),
    ({"embeddings": (torch.ones(3, 8), torch.ones(2), torch.ones(3))}, "kappa: expected shape"),
    (
        {"embeddings": (torch.ones(3, 8).double(), 1e300 * torch.ones(3).double(), torch.ones(3))},
        "kappa: expected numbers >= 0 that torch.float32 can hold",
    ),
    ({"ids": [41, 42]}, "ids: expected 3, one for each embedding, got 2"),
    ({"ids": [41, 42, 41]}, r"ids: expected identifiers that are all different, got \[41\] more"),
    ({"ids": [41, 7, 42]}, r"ids: expected identifiers that are not in the store yet, got \[7\]"),
    ({"ids": ["a", "b", "c"]}, "ids: expected whole numbers, as those in the store, got 'a'"),
    ({"ids": [41, "b", 42]}, "ids: expected .* whole numbers.* got values of type int, str"),
    ({"ids": np.array([1, 2, 2**64 - 1], dtype=np.uint64)}, "ids: expected numbers that int64"),
    ({"ids": torch.ones(3)}, "ids: .* got values of type float"),
]


@each("given, text", ADDITIONS)
def test_a_refused_addition_changes_nothing(device, given, text, store):
    with pytest.raises(cc.InputError, match=text):
        store.add(**{"ids": [41, 42, 43], "embeddings": small(3, seed=1), **given})
    assert len(store) == 40
    store.add([41, 42, 43], small(3, seed=1))
    store.delete([41, 42, 43])


SEARCHES = [
    ({"k": 0}, cc.InputError, "k: expected a positive whole number"),
    ({"k": 41}, cc.InputError, "k: expected at most 40, the number of embeddings, got 41"),
    ({"max_uncertainty": 1e-9}, cc.InputError, "k: expected at most 0, the number of embeddings"),
    ({"max_uncertainty": float("nan")}, cc.InputError, "max_uncertainty: expected a finite number >= 0"),
    ({"effort": 10}, cc.UnsupportedError, "effort: expected None for a 'flat' index, got 10"),
    ({"where": "nonsense > 3"}, (cc.InputError, cc.UnsupportedError), "where: expected"),
    ({"queries": torch.ones(2, 7)}, cc.InputError, "queries: expected D = 8, that of the store, got D = 7"),
    ({"queries": torch.zeros(2, 8)}, cc.InputError, "queries: expected non-zero rows"),
    ({"queries": torch.full((2, 8), float("nan"))}, cc.InputError, "queries: expected finite"),
    ({"queries": [1, 2]}, cc.InputTypeError, "queries: expected a torch.Tensor"),
]


@each("given, error, text", SEARCHES)
def test_refused_searches(device, given, error, text, store):
    given = dict(given)
    queries = given.pop("queries", torch.ones(2, 8))
    queries = queries.to(device) if isinstance(queries, torch.Tensor) else queries
    with pytest.raises(error, match=text):
        store.search(queries, **{"k": 3, **given})


@pytest.mark.parametrize("kind", STORES)
def test_an_empty_store(device, kind, tmp_path):
    store = make_store(kind, tmp_path)
    assert len(store) == 0
    assert store.dim is None
    assert store.index == "flat"
    with pytest.raises(cc.InputError, match="search: expected embeddings in the store, got an empty one"):
        store.search(torch.ones(1, 8, device=device))
    with pytest.raises(cc.InputError, match="create_index: expected embeddings in the store"):
        store.create_index("flat")
    with pytest.raises(cc.InputError, match="ids: expected identifiers that are in the store"):
        store.delete([3])
    # What was refused first does not decide the dimension.
    with pytest.raises(cc.InputError, match="kappa"):
        store.add([1], (torch.ones(1, 5), -torch.ones(1), torch.ones(1)))
    store.add([1], (torch.ones(1, 8), torch.ones(1), torch.zeros(1)))
    assert store.dim == 8
    assert int(store.search(torch.ones(1, 8, device=device), 1).ids) == 1


@each(
    "kind, index, options, text",
    [
        ("faiss", "ivf", {"lists": 50}, r"got {'lists': 50} \(.*at least as large as number of clusters"),
        ("faiss", "hnsw", {"links": 1}, r"got {'links': 1} \(FAISS needs two links"),
        ("lance", "ivf_pq", {"sub_vectors": 3}, r"got {'sub_vectors': 3} \(sub_vectors must divide 8"),
    ],
)
def test_options_that_do_not_fit(device, kind, index, options, text, tmp_path_factory):
    store = make_store(kind, tmp_path_factory.mktemp(kind))
    store.add(range(40), small())
    with pytest.raises(cc.InputError, match=f"create_index: expected options of '{index}' for 40 .* in 8 dim.* {text}"):
        store.create_index(index, **options)
    assert store.index == "flat"
    assert len(store.search(torch.ones(2, 8, device=device), 3)) == 2


def test_delete(device, store):
    vectors = small()[0].to(device)
    with pytest.raises(cc.InputError, match=r"ids: expected identifiers that are in the store, got \[77\]"):
        store.delete([3, 77])
    with pytest.raises(cc.InputTypeError, match="ids: expected whole numbers, as those in the store, got 'a'"):
        store.delete(["a"])
    assert len(store) == 40
    store.delete([])
    store.delete(torch.tensor([3, 38], device=device))
    assert len(store) == 38
    ids = store.search(vectors, 1).ids.flatten().tolist()
    assert [i for i, found in enumerate(ids) if i != found] == [3, 38]
    assert not {3, 38} & set(ids)
    # The others kept their own columns, and a deleted identifier is free again.
    assert torch.equal(store.search(vectors[10:11], 1).kappa.flatten().cpu(), small()[1][10:11])
    store.add([3], tuple(t[3:4] for t in small()))
    assert int(store.search(vectors[3:4], 1).ids) == 3


def test_faiss_cannot_delete_from_other_indices(device):
    store = cc.FaissStore()
    store.add(range(40), small())
    store.create_index("hnsw")
    with pytest.raises(cc.UnsupportedError, match="delete: expected a 'flat' index, got 'hnsw'"):
        store.delete([3])
    assert len(store) == 40


@pytest.mark.parametrize("kind", STORES)
def test_strings_as_identifiers(device, kind, tmp_path):
    store = make_store(kind, tmp_path)
    names = [f"""it's \\" é\n%_ {i}""" for i in range(40)]
    store.add(names, small())
    vectors = small()[0].to(device)
    assert store.search(vectors, 1).ids[:, 0].tolist() == names
    store.delete(names[20:])
    with pytest.raises(cc.InputTypeError, match="ids: expected strings, as those in the store"):
        store.add(range(3), small(3, seed=1))
    with pytest.raises(cc.InputError, match="not in the store yet"):
        store.add([names[30], names[5]], small(2, seed=1))
    assert len(store) == 20


@each(
    "payload, text",
    [
        ({}, r"payload: expected columns \['label'\], as in the store, got \[\]"),
        ({"label": [1, 2]}, r"payload\['label'\]: expected 3 values"),
        ({"label": [1.0, 1.5, 2.0]}, r"payload\['label'\]: expected int64, as in the store, got .*1.5"),
        ({"label": [1, "b", 3]}, r"payload\['label'\]: expected numbers, strings or bools"),
        ({"label": [1, 2, 3], "kappa": [1, 2, 3]}, "payload: expected names of small letters"),
    ],
)
def test_refused_payloads(device, payload, text, tmp_path_factory):
    store = make_store("lance", tmp_path_factory.mktemp("payload"))
    store.add(range(40), small(), payload={"label": torch.arange(40, device=device)})
    with pytest.raises(cc.InputError, match=text):
        store.add([41, 42, 43], small(3, seed=1), payload=payload)
    assert len(store) == 40


def test_faiss_keeps_no_payload(device):
    store = cc.FaissStore()
    with pytest.raises(cc.UnsupportedError, match=r"payload: expected None for a FaissStore, got columns \['label'\]"):
        store.add(range(40), small(), payload={"label": list(range(40))})
    assert len(store) == 0


@pytest.mark.parametrize(("package", "extra"), [("faiss", "faiss"), ("lancedb", "lance"), ("pyarrow", "lance")])
def test_a_missing_package_is_named(device, package, extra, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    text = rf"package {package}, got none installed\. In a copy of the repository: pip install '\.\[{extra}\]'\."
    with pytest.raises(cc.UnsupportedError, match=text):
        make_store("faiss" if package == "faiss" else "lance", tmp_path)
