"""The corpus of digits, and a store of each kind with it."""

from typing import Any

import pytest
from digits_corpus import STORES, Corpus, digits, make_store


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return digits()


@pytest.fixture(scope="session")
def stores(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = {}
    for kind in STORES:
        store = make_store(kind, tmp_path_factory.mktemp(kind))
        store.add(range(10_000), corpus.gallery, payload={"label": corpus.labels} if kind == "lance" else None)
        out[kind] = store
    return out
