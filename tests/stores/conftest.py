"""The corpus of digits, and a store of each kind with it."""

from typing import Any

import pytest


@pytest.fixture(scope="session")
def corpus() -> Any:
    # Here, because the module skips where faiss or lancedb is not installed.
    from digits_corpus import digits

    return digits()


@pytest.fixture(scope="session")
def stores(corpus: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from digits_corpus import STORES, make_store

    out = {}
    for kind in STORES:
        store = make_store(kind, tmp_path_factory.mktemp(kind))
        store.add(range(10_000), corpus.gallery, payload={"label": corpus.labels} if kind == "lance" else None)
        out[kind] = store
    return out
