"""``benchmarks.serving`` runs, and its exports are ``la(x)``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from devices import DEVICES

from benchmarks import serving

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.filterwarnings("ignore")
def test_quick_serving_benchmark(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del device
    threads = torch.get_num_threads()
    try:
        serving.main(["--quick", "--out", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    (case,) = json.loads((tmp_path / "serving.json").read_text())["cases"]
    assert [row["batch"] for row in case["rows"]] == [1, 3]
    assert all(row["ratios"].keys() == {"la(x)", "la.export pt2", "la.export onnx"} for row in case["rows"])
    assert max(case["difference"].values()) < 1e-5
    assert (tmp_path / "serving.md").read_text() in capsys.readouterr().out
