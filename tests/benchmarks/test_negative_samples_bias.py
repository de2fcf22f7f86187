"""``benchmarks.negative_samples_bias``: its errors against plain numbers, and the files that it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import negative_samples_bias
from benchmarks.transfer.feature_file import save_features
from tests.benchmarks.test_match_benchmarks import make_content


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negative_samples_bias, "POINTS", 60)
    monkeypatch.setattr(negative_samples_bias, "BANKS", {20: 3, 59: 2, 100: 2})


def test_errors_are_those_of_plain_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4000, 3, dtype=torch.float64, generator=generator)
    truth = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)
    shift = torch.tensor([0.0, 0.0, 0.5], dtype=torch.float64)
    found = negative_samples_bias.errors(truth + shift + 0.1 * noise, truth)
    assert found["bias"] == pytest.approx(0.1, abs=2e-3)
    assert found["spread"] == pytest.approx(0.1 * 3**0.5 / 5, rel=0.05)
    assert found["trace"] == pytest.approx(0.5 / 7, abs=4 * found["trace_error"])
    assert found["trace_error"] == pytest.approx(0.1 * 3**0.5 / 7 / 4000**0.5, rel=0.05)
    # Spread alone is no bias.
    assert negative_samples_bias.errors(truth + 0.1 * noise, truth)["bias"] < 0.002


def test_all_points_but_one_are_nearly_exact() -> None:
    found = negative_samples_bias.judge(make_content())["losses"]
    assert list(found) == list(negative_samples_bias.LOSSES)
    for by_size in found.values():
        assert list(by_size) == ["20", "59"]
        assert by_size["59"]["spread"] < by_size["20"]["spread"]
        assert by_size["59"]["bias"] < 0.1


def test_files_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    save_features(tmp_path / "made.npz", make_content())
    monkeypatch.setattr(sys, "argv", ["bias", "--cache", str(tmp_path), "--out", str(tmp_path / "out")])
    negative_samples_bias.main()
    text = (tmp_path / "out" / "negative_samples_bias.md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    assert "## made: 60 points of 8 classes" in text
    written = json.loads((tmp_path / "out" / "negative_samples_bias.json").read_text(encoding="utf-8"))
    assert set(written["encoders"]["made"]["losses"]) == set(negative_samples_bias.LOSSES)
