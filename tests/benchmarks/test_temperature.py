"""``benchmarks.temperature``: its draws, rules and choice against the library and plain loops."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import temperature
from benchmarks.transfer.feature_file import FeatureFile, save_features
from benchmarks.transfer.fitted import DEFAULT, Fitted
from contrastive_curvature import metrics
from tests.benchmarks.test_match_benchmarks import make_content

NAMES = ("faces", "data-trunk-4-supcon", "data-trunk-8-triplet")


@pytest.fixture(autouse=True)
def few_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temperature, "NETWORKS", 4)
    monkeypatch.setattr(temperature, "INPUTS", 60)


@pytest.fixture(scope="module")
def content() -> FeatureFile:
    return make_content()


def test_the_rule_of_the_library_gives_the_temperature_of_the_posterior(content: FeatureFile) -> None:
    la = Fitted(content).posterior(DEFAULT)
    found = temperature.judge(content)
    assert found["rules"][temperature.LIBRARY]["temperature"] == pytest.approx(la.temperature, rel=1e-5)
    assert found["rules"]["L / N"]["temperature"] == pytest.approx(float(la.cost) / la.n_data)
    assert found["factors"]["1"] == found["rules"]["L / N"]
    assert found["rules"]["1"]["temperature"] == 1
    assert 0 < found["effective"] < found["weights"] == la.mean.numel()


@pytest.mark.parametrize("rule", ["L / N", "1"])
def test_votes_are_those_of_networks_of_that_temperature(content: FeatureFile, rule: str) -> None:
    """At every temperature the same random numbers: so the library's own samples there give the same votes."""
    found = temperature.judge(content)["rules"][rule]
    la = Fitted(content).posterior(DEFAULT)
    prior = la.prior_precision * la.temperature
    la.temperature = found["temperature"]
    la.prior_precision = prior / la.temperature
    features, labels = temperature._some(content, 0)
    generator = torch.Generator().manual_seed(0)
    samples = la.functional_samples(features, "nn", n_samples=4, generator=generator)
    votes = metrics.retrieval_votes(samples, labels)
    assert metrics.brier_score(votes, labels) == pytest.approx(found["brier"], abs=0.02)
    bins = metrics.calibration_bins(votes, labels)
    assert bins.expected_calibration_error == pytest.approx(found["ece"], abs=0.02)


def test_every_input_that_is_judged_has_another_of_its_class(content: FeatureFile) -> None:
    labels = np.arange(len(content.test_labels))
    labels[:7] = 3
    alone = FeatureFile(**{**vars(content), "test_labels": labels})
    features, kept = temperature._some(alone, 1)
    assert len(features) == len(kept) < 7
    assert kept.tolist() == [3] * len(kept)


def test_the_choice_without_a_family_is_the_best_of_the_others() -> None:
    rules = list(temperature.RULES)

    def encoder(best: str, other: float) -> dict[str, Any]:
        figures = {rule: {"temperature": 1.0, "brier": 0.1 if rule == best else other, "ece": 0.0} for rule in rules}
        return {"rules": figures, "factors": {"1": figures[best], "3": figures[rules[-1]]}}

    made = {"a-1-supcon": encoder(rules[0], 0.3), "a-2-triplet": encoder(rules[0], 0.5), "b": encoder(rules[1], 0.4)}
    chosen = temperature.left_out(made, "brier")
    # Of the family a, rule 1 is the only one that b finds best; its two encoders count as one family.
    assert chosen == {"a": (rules[1], pytest.approx(0.4)), "b": (rules[0], pytest.approx(0.4))}
    assert temperature.hindsight(made["b"], "brier") == 0.1


def test_files_and_table(content: FeatureFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for seed, name in enumerate(NAMES):
        save_features(tmp_path / f"{name}.npz", make_content(seed=seed))
    arguments = ["temperature", "--cache", str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", arguments)
    temperature.main()
    text = (tmp_path / "out" / "temperature.md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    assert f"**{temperature.LIBRARY}**" in text
    assert "chosen by the other families" in text
    written = json.loads((tmp_path / "out" / "temperature.json").read_text(encoding="utf-8"))
    assert list(written["encoders"]) == sorted(NAMES)
    monkeypatch.setattr(sys, "argv", [*arguments, "--only", "faces"])
    temperature.main()
    again = json.loads((tmp_path / "out" / "temperature.json").read_text(encoding="utf-8"))
    assert again["encoders"] == written["encoders"]
