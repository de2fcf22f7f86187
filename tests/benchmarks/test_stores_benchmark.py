"""The benchmark of vector stores runs, and its recalls are those of the stores."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES

from benchmarks import stores


@pytest.mark.parametrize("device", DEVICES)
def test_a_small_run_writes_its_tables(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del device
    threads = torch.get_num_threads()

    def in_this_process(module: str, case: dict[str, Any], **environment: str) -> dict[str, Any]:
        assert module == "benchmarks.stores"
        return stores.measure(json.loads(json.dumps(case)))

    monkeypatch.setattr(stores, "run_apart", in_this_process)
    monkeypatch.setattr(stores, "STORES", (("FAISS", "flat"), ("FAISS", "hnsw"), ("Lance", "flat")))
    monkeypatch.setattr(stores, "STEPS", 30)
    monkeypatch.setattr(sys, "argv", ["stores", "--sizes", "300", "--queries", "120", "--out", str(tmp_path)])
    try:
        stores.main()
    finally:
        torch.set_num_threads(threads)
    result = json.loads((tmp_path / "stores.json").read_text(encoding="utf-8"))
    assert [(row["store"], row["index"]) for row in result["rows"]] == list(stores.STORES)
    for row in result["rows"]:
        exact = row["index"] == "flat"
        assert row["recall"] == 1 if exact else row["recall"] > 0.9
        assert row["filtered_recall"] == 1 if exact else row["filtered_recall"] > 0.9
        assert min(row["query_ms"], row["single_ms"], row["filtered_ms"], row["disk_mib"]) > 0
    assert result["brier"]["gallery"] == 300
    assert 0 < result["brier"]["store"] < 0.25
    text = (tmp_path / "stores.md").read_text(encoding="utf-8")
    assert text.count("| FAISS `flat` |") == 1
    assert f"{result['brier']['store']:.4f} with what a store keeps" in text
