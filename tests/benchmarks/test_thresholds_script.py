"""The benchmark of asked and observed errors: every decision on an encoder with pairs, by class where it is to be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_threshold import make_content

from benchmarks import thresholds
from benchmarks.transfer.feature_file import Pairs, save_features


def test_the_script_judges_every_decision_and_keeps_other_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "SPLITS", 10)
    monkeypatch.setattr(thresholds, "FALSE_MATCH_RATES", (0.02,))
    known = make_content()
    left, right = np.random.default_rng(0).integers(0, 480, (2, 1000))
    left, right = left[left != right], right[left != right]
    pairs = Pairs(left, right, left % 8 == right % 8, np.arange(len(left)) % 10, known.test_features)
    save_features(tmp_path / "people.npz", replace(known, test_labels=known.test_labels + 8, pairs=pairs))
    save_features(tmp_path / "text.npz", known)
    here = ["--cache", str(tmp_path), "--out", str(tmp_path / "out")]
    thresholds.main(here)
    thresholds.main([*here, "--only", "text"])
    found = json.loads((tmp_path / "out/thresholds.json").read_text(encoding="utf-8"))["encoders"]
    assert [one["unseen_classes"] for one in found.values()] == [True, False]
    common = ["wrong among answered", "wrong among all", "FMR 0.02, cosine"]
    unknown = [*(f"known flagged, {score}" for score in ("novelty", "uncertainty", "distance"))]
    unknown += ["worst class", "worst class, by class", "false among selected, novelty"]
    drift = ["drift 0.01", "drift 0.1"]
    assert list(found["text"]["decisions"]) == [*common, *drift, *unknown]
    assert list(found["people"]["decisions"]) == [
        *common,
        "LFW's pairs, FMR 0.02, cosine",
        "LFW's pairs, FMR 0.02, P(match)",
        *drift,
        *(f"{name}, other classes" for name in drift),
        *unknown,
    ]
    for name in unknown[:3]:
        assert found["text"]["decisions"][name]["observed"] == pytest.approx(0.05, rel=0.3)
    worst, by_class = (found["text"]["decisions"][name]["observed"] for name in unknown[3:5])
    assert by_class < worst
    assert found["text"]["decisions"]["wrong among all"]["observed"] == pytest.approx(
        found["text"]["decisions"]["wrong among all"]["asked"], rel=0.3
    )
    assert found["text"]["decisions"]["FMR 0.02, cosine"]["observed"] == pytest.approx(0.02, rel=0.3)


def test_halves_share_no_class_that_training_has_not_seen() -> None:
    content = make_content()
    for unseen in (False, True):
        encoder = thresholds.Encoder(replace(content, test_labels=content.test_labels + 8 * unseen))
        first, second = next(encoder.halves(np.arange(480)))
        assert len(first) == len(second) == 240
        assert bool(set(encoder.labels[first]) & set(encoder.labels[second])) is not unseen
