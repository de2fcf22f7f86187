"""The benchmark of thresholds, against the library's own calls."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from benchmarks import threshold
from benchmarks.transfer.feature_file import FeatureFile, save_features
from benchmarks.transfer.fitted import DEFAULT, Fitted

WIDTH, DIM = 10, 4


def make_content(*, calibration: bool = False, seed: int = 0) -> FeatureFile:
    g = np.random.default_rng(seed)
    centres = 2 * g.normal(size=(8, WIDTH))

    def draw(n: int) -> tuple[NDArray[Any], NDArray[Any]]:
        labels = np.arange(n) % 8
        size = np.exp(0.8 * g.normal(size=(n, 1)))
        return (centres[labels] + size * g.normal(size=(n, WIDTH))).astype(np.float32), labels

    def noise(*shape: int) -> NDArray[np.float32]:
        return g.normal(size=shape).astype(np.float32)

    (train, train_labels), (test, test_labels) = draw(240), draw(480)
    rows = g.permutation(480)[:48]
    content = FeatureFile(
        train,
        train_labels,
        test,
        test_labels,
        noise(DIM, WIDTH),
        np.full(DIM, 0.1, dtype=np.float32),
        unknown={"near": noise(60, WIDTH), "far": 4 * noise(60, WIDTH)},
        corrupted={("noise", k): test[rows] + 2 * k * noise(48, WIDTH) for k in (1, 2)},
        corrupted_rows=rows,
    )
    if calibration:
        found, labels = draw(240)
        one = {"near": content.unknown["near"]}
        content = replace(content, calibration_features=found, calibration_labels=labels, unknown=one)
    return content


def test_p_values_from_novelty_are_those_of_the_library() -> None:
    content = make_content(calibration=True)
    la = Fitted(content).posterior(DEFAULT)
    x, known = torch.from_numpy(content.test_features), torch.from_numpy(content.calibration_features)
    before = threshold._predict(la, content.test_features)[0]
    la.calibrate(DataLoader(TensorDataset(known), batch_size=50))
    embeddings = la(x)
    assert torch.equal(before, embeddings.novelty)
    found = threshold.p_values(la(known).novelty, embeddings.novelty)
    # The library counts what is equal up to rounding as equal.
    assert float((found - embeddings.p_value).abs().max()) < 2.5 / 241
    for alpha, share in zip(threshold.ALPHAS, threshold.flagged(found), strict=True):
        if alpha >= 1 / 241:
            assert share == pytest.approx(float((~embeddings.is_known(alpha)).double().mean()), abs=5 / 480)


@pytest.mark.parametrize("calibration", [True, False])
def test_shares_flagged_are_alpha_among_known_inputs_and_more_among_others(calibration: bool) -> None:
    content = make_content(calibration=calibration)
    found = threshold.judge(content, splits=50)
    # P-values from 240 inputs are multiples of 1 / 241.
    exact = [int(alpha * 241 + 1e-9) / 241 for alpha in threshold.ALPHAS]
    for share, expected, spread in zip(found["split"], exact, found["expected_deviation"], strict=True):
        assert share == pytest.approx(expected, abs=4 * spread / 50**0.5 + 1e-6)
    assert found["unseen_classes"] is False
    assert set(found["others"]) == ({"near", "noise 2"} if calibration else {"near", "far", "noise 2"})
    assert (found["validation"] is not None) == calibration
    assert found["others"]["noise 2"][2] > 0.2
    la = Fitted(content).posterior(DEFAULT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cc.OptimisticPValueWarning)
        without = la(torch.from_numpy(content.test_features)).p_value
    assert found["optimistic"] == pytest.approx(threshold.flagged(without), abs=5 / 480)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    threshold.main()


def test_the_script_writes_tables_and_keeps_other_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_features(tmp_path / "people.npz", make_content())
    save_features(tmp_path / "text.npz", make_content(calibration=True))
    here = ("--cache", str(tmp_path), "--out", str(tmp_path / "out"))
    run(monkeypatch, *here)
    run(monkeypatch, *here, "--only", "text")
    found = json.loads((tmp_path / "out/threshold.json").read_text(encoding="utf-8"))["encoders"]
    assert set(found) == {"people", "text"}
    table = (tmp_path / "out/threshold.md").read_text(encoding="utf-8").splitlines()
    for above, below in pairwise(line.count("|") for line in table):
        assert not (above and below) or above == below
