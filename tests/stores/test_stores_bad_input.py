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


def damaged(part: int, value: float, device: str) -> tuple[Any, ...]:
    parts = [t.clone().to(device) for t in small(3, seed=1)]
    parts[part][1] = value
    return tuple(parts)


ADDITIONS = [
    ({"embeddings": (0, float("nan"))}, cc.InputError, "mu: expected finite"),
    ({"embeddings": (0, float("inf"))}, cc.InputError, "mu: expected finite"),
    ({"embeddings": (0, 0.0)}, cc.InputError, "mu: expected non-zero rows"),
    ({"embeddings": (1, -1.0)}, cc.InputError, "kappa: expected numbers >= 0 .* got -1 to"),
    ({"embeddings": (1, float("nan"))}, cc.InputError, "kappa: expected finite"),
    ({"embeddings": (2, -0.5)}, cc.InputError, "uncertainty: expected numbers >= 0"),
    ({"embeddings": (2, float("nan"))}, cc.InputError, "uncertainty: expected finite"),
    ({"ids": [41, 42]}, cc.InputError, "ids: expected 3, one for each embedding, got 2"),
    ({"ids": [41, 42, 41]}, cc.InputError, r"ids: expected identifiers that are all different, got \[41\] more"),
    ({"ids": [41, 7, 42]}, cc.InputError, r"ids: expected identifiers that are not in the store yet, got \[7\]"),
    ({"ids": ["a", "b", "c"]}, cc.InputTypeError, "ids: expected whole numbers, as those in the store, got 'a'"),
    ({"ids": [41, "b", 42]}, cc.InputTypeError, "ids: expected .* whole numbers.* got values of type int, str"),
    ({"ids": [41, True, 42]}, cc.InputTypeError, "ids: .* got values of type bool, int"),
    ({"ids": [41, 42, 2**70]}, cc.InputError, "ids: expected numbers that int64 can hold"),
    ({"ids": torch.ones(3)}, cc.InputTypeError, "ids: .* got values of type float"),
    ({"ids": np.array([1, 2, 2**64 - 1], dtype=np.uint64)}, cc.InputError, "ids: expected numbers that int64"),
    ({"ids": torch.ones(3, 1).long()}, cc.InputTypeError, "ids: .* got values of type list"),
    ({"ids": {41, 42, 43}}, cc.InputTypeError, "ids: .* got a set"),
    ({"ids": "abc"}, cc.InputTypeError, "ids: .* got a str"),
    ({"embeddings": torch.ones(3, 8)}, cc.InputTypeError, "embeddings: expected an EmbeddingDistribution"),
    ({"embeddings": (torch.ones(3, 8),)}, cc.InputTypeError, "embeddings: .* got a tuple"),
    ({"embeddings": small(3, 7)}, cc.InputError, "embeddings: expected D = 8, that of the store, got D = 7"),
    ({"embeddings": (torch.ones(3, 8), torch.ones(2), torch.ones(3))}, cc.InputError, "kappa: expected shape"),
    ({"embeddings": (torch.ones(0, 8), torch.ones(0), torch.ones(0))}, cc.InputError, "mu: expected shape"),
    ({"embeddings": (torch.ones(3, 8).long(), torch.ones(3), torch.ones(3))}, cc.InputTypeError, "mu: expected a"),
    (
        {"embeddings": (torch.ones(3, 8).double(), 1e300 * torch.ones(3).double(), torch.ones(3))},
        cc.InputError,
        "kappa: expected numbers >= 0 that torch.float32 can hold",
    ),
]


@pytest.mark.parametrize(("given", "error", "text"), ADDITIONS)
def test_a_refused_addition_changes_nothing(device, given, error, text, store):
    given = {"ids": [41, 42, 43], "embeddings": small(3, seed=1), **given}
    value = given["embeddings"]
    if isinstance(value, tuple) and not isinstance(value[0], torch.Tensor):
        value = damaged(*value, device)
    with pytest.raises(error, match=text):
        store.add(given["ids"], value)
    assert len(store) == 40
    store.add([41, 42, 43], small(3, seed=1))
    assert len(store) == 43


SEARCHES = [
    ({"k": 0}, cc.InputError, "k: expected a positive whole number"),
    ({"k": 2.0}, cc.InputError, "k: expected a positive whole number"),
    ({"k": 41}, cc.InputError, "k: expected at most 40, the number of embeddings, got 41"),
    ({"max_uncertainty": 1e-9}, cc.InputError, "k: expected at most 0, the number of embeddings"),
    ({"max_uncertainty": float("nan")}, cc.InputError, "max_uncertainty: expected a finite number >= 0"),
    ({"max_uncertainty": -1}, cc.InputError, "max_uncertainty: expected a finite number >= 0"),
    ({"max_uncertainty": "0.5"}, cc.InputTypeError, "max_uncertainty: expected a finite number >= 0"),
    ({"effort": 10}, cc.UnsupportedError, "effort: expected None for a 'flat' index, got 10"),
    ({"where": 3}, (cc.InputError, cc.UnsupportedError), "where: expected"),
    ({"where": ""}, (cc.InputError, cc.UnsupportedError), "where: expected"),
    ({"where": "nonsense > 3"}, (cc.InputError, cc.UnsupportedError), "where: expected"),
    ({"where": "id = (3"}, (cc.InputError, cc.UnsupportedError), "where: expected"),
    ({"queries": torch.ones(2, 7)}, cc.InputError, "queries: expected D = 8, that of the store, got D = 7"),
    ({"queries": torch.zeros(2, 8)}, cc.InputError, "queries: expected non-zero rows"),
    ({"queries": torch.full((2, 8), float("nan"))}, cc.InputError, "queries: expected finite"),
    ({"queries": torch.ones(0, 8)}, cc.InputError, "queries: expected shape"),
    ({"queries": [1, 2]}, cc.InputTypeError, "queries: expected a torch.Tensor"),
    ({"queries": (torch.ones(2, 8),)}, cc.InputTypeError, "queries: .* got a tuple"),
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
    assert "0 embeddings" in repr(store)
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


def test_indices_that_do_not_exist(device, store):
    with pytest.raises(cc.InputError, match="kind: expected one of 'flat', "):
        store.create_index("annoy")
    for kind in store.kinds:
        with pytest.raises(cc.InputError, match="create_index: expected"):
            store.create_index(kind, trees=3)
    with pytest.raises(cc.InputError, match="a positive whole number"):
        store.create_index(list(store.kinds)[1], **{next(iter(store.kinds[list(store.kinds)[1]])): 0})
    assert store.index == "flat"
    assert len(store.search(torch.ones(2, 8, device=device), 3)) == 2


@pytest.mark.parametrize(
    ("kind", "index", "options", "text"),
    [
        ("faiss", "ivf", {"lists": 50}, r"got {'lists': 50} \(.*at least as large as number of clusters"),
        ("faiss", "hnsw", {"links": 1}, r"got {'links': 1} \(FAISS needs two links"),
        ("lance", "ivf_pq", {"sub_vectors": 3}, r"got {'sub_vectors': 3} \(sub_vectors must divide 8"),
    ],
)
def test_options_that_do_not_fit(device, kind, index, options, text, tmp_path):
    store = make_store(kind, tmp_path)
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


@pytest.mark.parametrize("index", ["hnsw", "ivf"])
def test_faiss_cannot_delete_from_other_indices(device, index):
    store = cc.FaissStore()
    store.add(range(40), small())
    store.create_index(index)
    with pytest.raises(cc.UnsupportedError, match=f"delete: expected a 'flat' index, got '{index}'"):
        store.delete([3])
    assert len(store) == 40


@pytest.mark.parametrize("kind", STORES)
def test_strings_as_identifiers(device, kind, tmp_path):
    store = make_store(kind, tmp_path)
    names = [f"""it's \\" é\n%_ {i}""" for i in range(40)]
    store.add(names, small())
    vectors = small()[0].to(device)
    assert store.search(vectors, 1).ids[:, 0].tolist() == names
    mu, kappa = store.search(vectors, 2).hits()
    assert (len(mu), len(kappa)) == (80, 80)  # two for each of the queries
    store.delete(names[20:])
    with pytest.raises(cc.InputTypeError, match="ids: expected strings, as those in the store"):
        store.add(range(3), small(3, seed=1))
    with pytest.raises(cc.InputError, match="not in the store yet"):
        store.add([names[30], names[5]], small(2, seed=1))
    assert len(store) == 20
    result = store.search(vectors, 3)
    assert result.retrieval_uncertainty(torch.ones(40), torch.ones(99)).shape == (40,)


PAYLOADS = [
    ({}, cc.InputError, r"payload: expected columns \['label'\], as in the store, got \[\]"),
    ({"label": [1, 2]}, cc.InputError, r"payload\['label'\]: expected 3 values"),
    (
        {"label": ["a", "b", "c"]},
        cc.InputTypeError,
        r"payload\['label'\]: expected int64, as .*: 'c' as",
    ),
    ({"label": [1.0, 1.5, 2.0]}, cc.InputTypeError, r"payload\['label'\]: expected int64, as in the store, got .*1.5"),
    ({"label": [1, "b", 3]}, cc.InputTypeError, r"payload\['label'\]: expected numbers, strings or bools"),
    ({"label": [1, 2, 3], "kappa": [1, 2, 3]}, cc.InputError, "payload: expected names of small letters"),
    ({"label": [1, 2, 3], "other": [1, 2, 3]}, cc.InputError, "payload: expected columns"),
    ({"label": [1, 2, 3], "new": [None, None, None]}, cc.InputTypeError, r"payload\['new'\]: expected values that say"),
    ({"la bel": [1, 2, 3]}, cc.InputError, "payload: expected names of small letters"),
]


@pytest.mark.parametrize(("payload", "error", "text"), PAYLOADS)
def test_refused_payloads(device, payload, error, text, tmp_path):
    store = make_store("lance", tmp_path)
    store.add(range(40), small(), payload={"label": torch.arange(40, device=device)})
    with pytest.raises(error, match=text):
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
    text = rf"expected the package {package}, got none installed. pip install 'contrastive-curvature\[{extra}\]'"
    with pytest.raises(cc.UnsupportedError, match=text):
        make_store("faiss" if package == "faiss" else "lance", tmp_path)
