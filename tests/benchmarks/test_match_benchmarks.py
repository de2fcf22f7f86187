"""Benchmarks of match probabilities and thresholds: against the library's own calls, sklearn and counts."""

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
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from benchmarks import match_probability, threshold
from benchmarks.transfer import matching, searching
from benchmarks.transfer.feature_file import FeatureFile, Pairs, save_features
from benchmarks.transfer.fitted import DEFAULT, Fitted
from benchmarks.transfer.verification import true_accept_rate
from contrastive_curvature import metrics
from contrastive_curvature.errors import InputError

WIDTH, DIM = 10, 4


def make_content(*, pairs: bool = False, calibration: bool = False, seed: int = 0) -> FeatureFile:
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
        harmed={("noise", k): test[rows] + 2 * k * noise(48, WIDTH) for k in (1, 2)},
        harmed_rows=rows,
    )
    if calibration:
        found, labels = draw(240)
        one = {"near": content.unknown["near"]}
        content = replace(content, calibration_features=found, calibration_labels=labels, unknown=one)
    if pairs:
        left = np.repeat(np.arange(160), 2)
        right = np.stack([(np.arange(160) + 8) % 160, (np.arange(160) + 3) % 160], 1).ravel()
        same, fold, seen = test_labels[left] == test_labels[right], np.arange(320) % 4, np.arange(320) % 5 == 0
        content = replace(content, pairs=Pairs(left, right, same, fold, people_in_train=seen))
    return content


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "RESAMPLES", 3)


@pytest.fixture(scope="module")
def content() -> FeatureFile:
    return make_content(pairs=True)


@pytest.fixture(scope="module")
def la(content: FeatureFile) -> Any:
    return Fitted(content).posterior(DEFAULT)


# Figures of probabilities


@given(st.integers(0, 10**6), st.integers(2, 300))
def test_figures_are_those_of_sklearn_and_of_a_loop(seed: int, n: int) -> None:
    g = np.random.default_rng(seed)
    said, happened = g.uniform(0, 1, n), (np.arange(n) % 2).astype(np.float64)
    found = matching.probability_figures(said, happened, pairs=True)
    assert found["brier"] == pytest.approx(brier_score_loss(happened, said))
    assert found["log_loss"] == pytest.approx(log_loss(happened, said))
    total = 0.0
    for k in range(matching.BINS):
        low, high = k / matching.BINS, (k + 1) / matching.BINS
        part = (said >= low) & (said < high)
        if part.any():
            total += part.mean() * abs(said[part].mean() - happened[part].mean())
    assert found["ece"] == pytest.approx(total)
    right = torch.from_numpy(((said >= 0.5) == (happened == 1)).astype(float))
    curve = metrics.sparsification_curve(torch.from_numpy(-np.abs(said - 0.5)), right)
    for share in matching.REJECTED:
        kept = max(1, round((1 - share) * n))
        assert found[f"error_at_{share:g}"] == pytest.approx(1 - float(curve.performance[n - kept]))


@given(st.integers(0, 10**6), st.integers(1, 3000), st.integers(1, 50))
def test_true_accepts_are_those_of_the_roc_curve(seed: int, n: int, levels: int) -> None:
    g = np.random.default_rng(seed)
    happened = np.r_[0.0, 1.0, g.integers(0, 2, n)]
    said = g.integers(0, levels, n + 2) / levels
    expected = true_accept_rate(torch.from_numpy(said), torch.from_numpy(happened == 1), matching.FALSE_ACCEPT)
    assert matching.probability_figures(said, happened, pairs=True)["true_accept"] == pytest.approx(expected)


def test_certain_and_right_probabilities_have_no_error() -> None:
    truth = np.array([0.0, 1.0, 1.0])
    found = matching.probability_figures(truth, truth, pairs=True)
    assert found["brier"] == found["ece"] == found["error"] == 0
    assert found["true_accept"] == 1


def test_standard_errors_of_a_mean_are_those_of_theory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "RESAMPLES", 200)
    g = torch.Generator().manual_seed(0)
    happened = torch.rand(2000, generator=g) < 0.3
    said = {"cosine": torch.full((2000,), 0.3), "other": torch.full((2000,), 0.5)}
    found = matching.summary(said, happened)["models"]
    terms = (0.3 - happened.double()).square()
    assert found["cosine"]["brier"][0] == pytest.approx(float(terms.mean()))
    assert found["cosine"]["brier"][1] == pytest.approx(float(terms.std()) / 2000**0.5, rel=0.2)
    assert found["cosine"]["brier"][2:] == [0, 0]
    gain = (0.5 - happened.double()).square() - terms
    assert found["other"]["brier"][2] == pytest.approx(float(gain.mean()))
    assert found["other"]["brier"][3] == pytest.approx(float(gain.std()) / 2000**0.5, rel=0.2)


# Pairs


@pytest.mark.parametrize("seen_in_fit", [True, False])
def test_pairs_are_judged_as_match_probability_does(content: FeatureFile, la: Any, seen_in_fit: bool) -> None:
    said, same = matching.judge_pairs(la, content, seen_in_fit)
    pairs = content.pairs
    assert pairs is not None
    assert pairs.people_in_train is not None
    kept = np.ones(320, dtype=bool) if seen_in_fit else ~pairs.people_in_train
    left, right = (torch.from_numpy(content.test_features[side[kept]]) for side in (pairs.left, pairs.right))
    fold = torch.from_numpy(pairs.fold[kept])
    assert same.tolist() == pairs.same[kept].tolist()
    options: dict[str, dict[str, Any]] = {
        "cosine": {"use_uncertainty": False},
        "with uncertainties": {},
        "with uncertainties, isotonic": {"curve": "isotonic"},
    }
    for name, given_options in options.items():
        match = cc.MatchProbability(**given_options)
        match.fit_pairs(la(left[fold != 2]), la(right[fold != 2]), same[fold != 2])
        expected = match.same(la(left[fold == 2]), la(right[fold == 2]))
        close = torch.isclose(said[name][fold == 2], expected.double(), atol=1e-5)
        # An isotonic curve jumps, so the rounding of a batch shows at a few points.
        assert float(close.double().mean()) > (0.95 if "isotonic" in name else 0.9999)


def test_pairs_need_what_they_are_made_of(content: FeatureFile, la: Any) -> None:
    with pytest.raises(InputError, match="pairs_left"):
        matching.judge_pairs(la, replace(content, pairs=None))
    assert content.pairs is not None
    with pytest.raises(InputError, match="people_in_train"):
        matching.judge_pairs(la, replace(content, pairs=replace(content.pairs, people_in_train=None)), False)
    with pytest.raises(InputError, match="harmed"):
        matching.harmed_pairs(replace(content, harmed={}, harmed_rows=None))


def test_the_control_with_norms_needs_no_posterior(content: FeatureFile, la: Any) -> None:
    x = torch.from_numpy(content.test_features)
    seen = matching.shown(la, x[:50], x[50:100])
    z = [part @ torch.from_numpy(content.weight).T + torch.from_numpy(content.bias) for part in (x[:50], x[50:100])]
    inverse = torch.stack([1 / part.norm(dim=1) for part in z], 1).double()
    assert torch.allclose(seen[:, 4].exp(), inverse.square().sum(1), rtol=1e-4)
    assert torch.allclose(seen[:, 5].exp(), inverse.amax(1), rtol=1e-4)
    assert torch.allclose(seen[:, 6].exp(), inverse.amin(1), rtol=1e-4)


def test_harmed_pairs_share_no_class_between_folds(content: FeatureFile) -> None:
    pairs = matching.harmed_pairs(content, folds=3)
    assert content.harmed_rows is not None
    one, other = content.harmed_rows[pairs["harmed"]], pairs["other"].numpy()
    labels = content.test_labels
    assert (one != other).all()
    assert ((labels[one] == labels[other]) == pairs["same"].numpy()).all()
    assert 0.4 < float(pairs["same"].double().mean()) < 0.6
    for left, right in ((0, 1), (0, 2), (1, 2)):
        part = [set(labels[np.r_[one[pairs["fold"] == k], other[pairs["fold"] == k]]]) for k in (left, right)]
        assert not part[0] & part[1]


def test_a_calibration_that_saw_harm_is_better_on_harm(content: FeatureFile, la: Any) -> None:
    found = matching.judge_harmed_pairs(la, content)
    assert set(found) == {"clean", "mix", "other kinds"}
    # With one kind of harm, "other kinds" is clean pairs alone.
    assert found["other kinds"]["worst level"] == found["clean"]["worst level"]
    brier = [found[c]["worst level"]["models"]["cosine"]["brier"][0] for c in ("mix", "clean")]
    assert brier[0] < brier[1]


# Searches


@pytest.mark.parametrize("calibration", [True, False])
def test_no_judged_query_is_in_a_fit_or_a_gallery(calibration: bool) -> None:
    content = make_content(calibration=calibration)
    found = list(searching.searches(content))
    assert len(found) == (1 if calibration else 2)
    judged = 0
    for search in found:
        fit = {tuple(x) for query in search.fit.values() for x in query.features.tolist()}
        asked = {tuple(x) for query in search.judged.values() for x in query.features.tolist()}
        stored = [{tuple(x) for x in gallery.features.tolist()} for gallery in search.galleries]
        assert not asked & fit
        assert not asked & stored[1]
        assert not fit & stored[0]
        known = search.judged["known"]
        assert set(known.labels.tolist()) <= set(search.galleries[1].labels.tolist())
        assert not set(search.judged["unknown"].labels.tolist()) & set(search.galleries[1].labels.tolist())
        if not calibration:
            assert not set(known.labels.tolist()) & set(search.fit["known"].labels.tolist())
            # The original of a harmed query must not be found.
            harmed = content.test_features[content.harmed_rows].tolist()
            assert not {tuple(x) for x in harmed} & (stored[0] | stored[1])
        judged += len(known.labels)
    assert judged == (480 - 24 if calibration else 240)


def test_searches_are_judged_as_match_probability_does() -> None:
    content = make_content(calibration=True)
    la = Fitted(content).posterior(DEFAULT)
    found = searching.judge_searches(la, content)
    (search,) = searching.searches(content)
    gallery, known, judged = la(search.galleries[0].features), search.fit["known"], search.judged
    match = cc.MatchProbability()
    match.fit_retrieval(la(known.features), known.labels, gallery, search.galleries[0].labels)
    no_match = {name: match.nearest(la(judged[name].features), gallery).no_match for name in ("known", "unknown")}
    brier = float((1 - no_match["unknown"].double()).square().mean())
    assert found["known"]["unknown"]["models"]["with uncertainties"]["brier"][0] == pytest.approx(brier, abs=1e-5)
    truth = np.r_[np.zeros(len(no_match["known"])), np.ones(len(no_match["unknown"]))]
    area = roc_auc_score(truth, torch.cat(list(no_match.values())).numpy())
    assert found["known"]["auroc"]["with uncertainties"] == pytest.approx(area, abs=1e-4)


def test_a_mix_makes_probabilities_of_unknown_queries_smaller() -> None:
    content = make_content()
    found = searching.judge_searches(Fitted(content).posterior(DEFAULT), content)
    brier = [found[c]["unknown"]["models"]["cosine"]["brier"][0] for c in ("mix", "known")]
    assert brier[0] < brier[1]
    assert found["mix"]["mixture"]["n"] == 240 + 120 + 96


def test_open_set_counts_by_hand() -> None:
    content = make_content(calibration=True)
    la = Fitted(content).posterior(DEFAULT)
    found = searching.open_set(la, content, draws=3, few=10)
    assert content.calibration_features is not None
    x = {
        "gallery": content.train_features,
        "validation": content.calibration_features,
        "test": content.test_features,
        "unknown": content.unknown["near"],
    }
    mu = {name: torch.nn.functional.normalize(la.model(torch.from_numpy(v)), dim=1) for name, v in x.items()}
    cosine, index = ((mu["test"] @ mu["gallery"].T).max(1)[k] for k in (0, 1))
    # `no match` of the cosine alone falls with the cosine, so its threshold is one for the cosine.
    limit = (mu["validation"] @ mu["gallery"].T).amax(1).quantile(0.05)
    right = torch.from_numpy(content.train_labels)[index] == torch.from_numpy(content.test_labels)
    recall = ((mu["unknown"] @ mu["gallery"].T).amax(1) < limit).double().mean()
    accuracy = (right & (cosine >= limit)).double().mean()
    assert found["cosine"]["reject 5 %"][:2] == pytest.approx([float(accuracy), float(recall)], abs=0.02)
    assert searching.open_set(la, make_content()) == {}


def test_the_best_threshold_is_that_of_a_search() -> None:
    g = torch.Generator().manual_seed(1)
    for _ in range(20):
        known, unknown = torch.rand(9, generator=g), torch.rand(5, generator=g) + 0.3
        right = torch.rand(9, generator=g) < 0.7
        right[0] = True

        def gain(limit: float, known: Any = known, right: Any = right, unknown: Any = unknown) -> int:
            return int((known[right] <= limit).sum()) + int((unknown > limit).sum())

        best = max(gain(float(limit)) for limit in torch.cat([known[right], unknown]))
        assert gain(searching._best(known, right, unknown)) == best


# Thresholds


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


# Scripts


def _run(monkeypatch: pytest.MonkeyPatch, script: Any, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    script.main()


def test_scripts_write_tables_and_keep_other_results(
    tmp_path: Path, content: FeatureFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_features(tmp_path / "people.npz", content)
    save_features(tmp_path / "text.npz", make_content(calibration=True))
    here = ("--cache", str(tmp_path), "--out", str(tmp_path / "out"))
    _run(monkeypatch, match_probability, *here, "--only", "text")
    _run(monkeypatch, match_probability, *here, "--only", "people", "--plots", str(tmp_path / "plots"))
    found = json.loads((tmp_path / "out/match_probability.json").read_text(encoding="utf-8"))["encoders"]
    assert set(found) == {"people", "text"}
    text = (tmp_path / "out/match_probability.md").read_text(encoding="utf-8")
    assert "nan" not in text
    assert (tmp_path / "plots/people/reliability.png").stat().st_size > 1000
    _run(monkeypatch, threshold, *here)
    _run(monkeypatch, threshold, *here, "--only", "text")
    assert set(json.loads((tmp_path / "out/threshold.json").read_text(encoding="utf-8"))["encoders"]) == set(found)
    for name in ("match_probability", "threshold"):
        table = (tmp_path / f"out/{name}.md").read_text(encoding="utf-8").splitlines()
        widths = [line.count("|") for line in table]
        for above, below in pairwise(widths):
            assert not (above and below) or above == below


@pytest.mark.parametrize("script", [match_probability, threshold])
def test_scripts_say_where_feature_files_come_from(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _run(monkeypatch, script, "--cache", str(tmp_path))
    assert "benchmarks.transfer makes them" in capsys.readouterr().err


@pytest.mark.parametrize("script", [match_probability, threshold])
def test_scripts_name_feature_files_that_are_missing(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("people", "text"):
        save_features(tmp_path / f"{name}.npz", make_content())
    out = tmp_path / "out"
    with pytest.raises(SystemExit):
        _run(monkeypatch, script, "--cache", str(tmp_path), "--out", str(out), "--only", "text", "drawings", "texts")
    assert "--only: no drawings, texts in" in (said := capsys.readouterr().err)
    assert "there are people, text" in said
    assert not out.exists()
