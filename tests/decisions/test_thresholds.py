"""Thresholds with a stated error: their promises over many splits, oracles of single numbers, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom, binomtest, norm
from sklearn.metrics import roc_curve
from tables import each

import contrastive_curvature as cc
from contrastive_curvature import metrics

SPLITS = 600
GRID = np.linspace(0, 1, 20001)


def above(share: float, wanted: float) -> bool:
    """Whether a share of the splits is above one that is promised, beyond what chance does once in ten thousand."""
    return bool(binom.sf(round(share * SPLITS) - 1, SPLITS, wanted) < 1e-4)


@each(
    "wrong_at",
    [
        lambda score: 1 / (1 + np.exp(-20 * (score - 0.75))),
        lambda score: 0.4 * score**2,
        lambda score: np.where(score < 0.5, 0.01, 0.3),
        lambda score: 0.07 + 0 * score,  # nothing may be answered
    ],
)
def test_answers_are_as_seldom_wrong_as_promised(wrong_at: Callable[[Any], Any]) -> None:
    rng = np.random.default_rng(0)
    wrong = np.cumsum(wrong_at(GRID)) / len(GRID)
    among = wrong / np.maximum(GRID, GRID[1])
    limits: dict[str, list[float]] = {"answered": [], "all": []}
    for _ in range(SPLITS):
        score = rng.random(400)
        right = rng.random(400) >= wrong_at(score)
        for kind, found in limits.items():
            try:
                found.append(cc.RetrievalThreshold(0.05, kind, 0.9).fit(score, right).threshold)  # type: ignore[arg-type]
            except cc.InputError:
                found.append(0.0)
    broken = np.interp(limits["answered"], GRID, among) > 0.05 + 1e-9
    assert not above(float((broken & (np.array(limits["answered"]) > 0)).mean()), 0.1)
    share = np.interp(limits["all"], GRID, wrong)
    assert share.mean() + 4 * share.std() / math.sqrt(SPLITS) > 0.05 - 2 / 401
    assert share.mean() - 4 * share.std() / math.sqrt(SPLITS) < 0.05


def test_limits_of_queries_against_a_search_by_hand() -> None:
    rng = np.random.default_rng(1)
    for _ in range(30):
        score = rng.integers(0, 60, 400) / 60  # ties
        right = rng.random(400) >= 0.3 * score**2
        wrong = {limit: int((~right[score <= limit]).sum()) for limit in np.unique(score)}
        accepted = {limit: int((score <= limit).sum()) for limit in wrong}
        best = 0.0
        for start in (93, 200):  # of 93, one may be wrong with an error of 0.05, half of 0.1
            some = [limit for limit in wrong if accepted[limit] >= start]
            passed = [limit for limit in some if binom.cdf(wrong[limit], accepted[limit], 0.05) <= 0.05]
            stopped = min(set(some) - set(passed), default=2.0)
            best = max([best, *(limit for limit in passed if limit < stopped)])
        if best:
            fitted = cc.RetrievalThreshold(0.05).fit(torch.from_numpy(score), torch.from_numpy(right))
            assert fitted.threshold == best
            assert fitted.answered == accepted[best] / 400
        everywhere = cc.RetrievalThreshold(0.05, "all").fit(score, right)
        assert everywhere.threshold == max(limit for limit in wrong if (wrong[limit] + 1) / 401 <= 0.05)
    asked = torch.tensor([everywhere.threshold, everywhere.threshold + 1e-9], dtype=torch.float64)
    assert torch.equal(everywhere.accept(asked), torch.tensor([True, False]))
    assert isinstance(everywhere.accept(asked.numpy()), np.ndarray)


def people(rng: np.random.Generator, n: int = 40, images: int = 2) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """All pairs of images of people who differ in how much they look like others; 1 is added for one person."""
    of = np.repeat(np.arange(n), images)
    left, right = np.triu_indices(n * images, 1)
    persons = np.stack([of[left], of[right]], 1)
    same = persons[:, 0] == persons[:, 1]
    kind = 0.5 * rng.normal(size=n)
    return kind[persons].sum(1) + same + rng.normal(size=len(same)), same, persons


def test_false_matches_are_as_seldom_as_promised() -> None:
    rng = np.random.default_rng(2)
    same = np.arange(260) < 10
    rates = [1 - cc.MatchThreshold(0.02).fit(rng.random(260) + same, same).threshold for _ in range(SPLITS)]
    assert abs(np.mean(rates) - 5 / 251) < 4 * math.sqrt(5 * 246 / 251**2 / 252 / SPLITS)  # of Beta(5, 246)


def test_intervals_hold_where_pairs_share_persons() -> None:
    rng = np.random.default_rng(2)
    rates, inside, narrow = [], [], []
    for _ in range(SPLITS):
        scores, same, persons = people(rng)
        fitted = cc.MatchThreshold(0.02).fit(scores, same, persons)
        rates.append(norm.sf(fitted.threshold / math.sqrt(1.5)))
        missed = norm.cdf((fitted.threshold - 1) / math.sqrt(2))
        intervals = (fitted.false_match_interval, fitted.false_non_match_interval)
        inside.append([low <= rate <= high for (low, high), rate in zip(intervals, (rates[-1], missed), strict=True)])
        narrow.append(cc.MatchThreshold(0.02).fit(scores, same).false_match_interval)
    share = np.mean(inside, axis=0)
    assert share.min() > 0.92
    assert share.max() < 0.995
    low, high = np.transpose(narrow)
    assert ((low <= rates) & (rates <= high)).mean() < 0.8  # without the persons, intervals are too narrow


def test_a_match_threshold_against_sorting_and_scipy() -> None:
    rng = np.random.default_rng(3)
    same = np.arange(1999) < 500
    scores = rng.normal(size=1999) + 2 * same
    fitted = cc.MatchThreshold(0.002).fit(torch.from_numpy(scores), torch.from_numpy(same))
    assert fitted.threshold == np.sort(scores[~same])[-3]
    decided = fitted.same(scores)
    assert decided[~same].sum() == 2
    missed = int((~decided[same]).sum())
    assert fitted.false_non_match_rate == missed / 500
    for interval, k, n in ((fitted.false_non_match_interval, missed, 500), (fitted.false_match_interval, 2, 1499)):
        oracle = binomtest(k, n).proportion_ci(0.95, "exact")
        assert interval == pytest.approx((oracle.low, oracle.high), rel=1e-9)
    alone = np.arange(2 * 1999).reshape(-1, 2)
    alone[same, 1] = alone[same, 0]
    grouped = cc.MatchThreshold(0.002).fit(scores, same, torch.from_numpy(alone))
    # Every person in one pair: the sum of squares is that of independent pairs.
    assert grouped.false_non_match_interval == pytest.approx(fitted.false_non_match_interval, rel=1e-9)
    assert grouped.false_match_interval == pytest.approx(fitted.false_match_interval, rel=1e-9)
    # Nearly every person is missed once in two: the interval is no narrower than that of independent pairs.
    even, low = np.arange(300) < 100, np.where(np.arange(300) < 51, -9.0, 9.0)
    of = np.stack([np.where(even, np.arange(300) % 50, np.arange(300))] * 2, 1)
    balanced = cc.MatchThreshold(0.1).fit(np.where(even, low, np.arange(300) / 300), even, of)
    oracle = binomtest(51, 100).proportion_ci(0.95, "exact")
    assert balanced.false_non_match_interval == pytest.approx((oracle.low, oracle.high), rel=1e-9)
    # Nobody is missed: 100 people count as 100 pairs, of however many images.
    clear = cc.MatchThreshold(0.1).fit(scores + 20 * same, same, np.stack([np.arange(1999) % 100] * 2, 1))
    assert clear.false_non_match_interval == (0, pytest.approx(1 - 0.025**0.01))


def test_det_curve_and_equal_error_rate_against_scikit_learn() -> None:
    rng = np.random.default_rng(4)
    same = rng.random(500) < 0.4
    for scores in (rng.normal(size=500) + same, rng.integers(0, 7, 500) + 2.0 * same, 9.0 * same, -1.0 * same):
        falsely, truly, _ = roc_curve(same, scores, drop_intermediate=False)
        curve = metrics.det_curve(torch.from_numpy(scores), torch.from_numpy(same))
        np.testing.assert_allclose(curve.false_match_rate, falsely[-2::-1], atol=1e-15)
        np.testing.assert_allclose(curve.false_non_match_rate, 1 - truly[-2::-1], atol=1e-15)
        points = list(zip(curve.threshold.tolist(), curve.false_match_rate.tolist(), strict=True))
        assert all(rate == pytest.approx(float((scores[~same] > limit).mean())) for limit, rate in points)
        # Along the curve both rates are functions of its length, whose difference has one zero.
        steps = np.arange(len(falsely))
        zero = brentq(
            lambda at, f=falsely, t=truly, s=steps: np.interp(at, s, f) + np.interp(at, s, t) - 1, 0, steps[-1]
        )
        assert metrics.equal_error_rate(scores, same) == pytest.approx(np.interp(zero, steps, falsely), abs=1e-9)


def test_sentences() -> None:
    right, queries = np.arange(1000) < 900, "from 1,000 labelled queries"
    assert repr(cc.RetrievalThreshold().fit(np.arange(1000.0), right)) == (
        f"accepts 93.5 % of queries; at most 5 % of those are wrong, with 90 % confidence, {queries}"
    )
    assert repr(cc.RetrievalThreshold(among="all").fit(np.arange(1000.0), right)) == (
        f"accepts 94.9 % of queries; wrong answers are at most 5 % of all queries, on average, {queries}"
    )
    scores = np.concatenate([np.arange(100), np.arange(99) - 50.0])
    sentence = repr(cc.MatchThreshold(0.1).fit(scores, np.arange(199) < 100))
    assert sentence == (
        "same above 39: at most 10 % of pairs of two classes count as the same, on average; "
        "40 % (30.3 % to 50.3 %) of pairs of one class are missed, from 100 and 99 labelled pairs"
    )
    assert "not fitted" in repr(cc.RetrievalThreshold()) + repr(cc.MatchThreshold())


N = 100
SCORE = np.arange(float(N))
RIGHT = SCORE < 90


@each(
    "call, kind, words",
    [
        (lambda: cc.RetrievalThreshold(1.5), cc.InputError, ("risk", "1.5")),
        (lambda: cc.RetrievalThreshold(0.1, "some"), cc.InputError, ("among", "'answered'", "'all'", "some")),  # type: ignore[arg-type]
        (lambda: cc.RetrievalThreshold().threshold, cc.NotFittedError, ("threshold", "fit(...)")),
        (lambda: cc.RetrievalThreshold().limit, AttributeError, ("limit",)),  # type: ignore[attr-defined]
        (lambda: cc.RetrievalThreshold().accept(SCORE), cc.NotFittedError, ("threshold", "fit(...)")),
        (lambda: cc.RetrievalThreshold(0.01).fit(SCORE, RIGHT), cc.InputError, ("230 queries", "100")),
        (lambda: cc.RetrievalThreshold(0.005, "all").fit(SCORE, RIGHT), cc.InputError, ("199 queries", "100")),
        (lambda: cc.RetrievalThreshold(0.1).fit(-SCORE, RIGHT), cc.InputError, ("score", "AUROC 0.00", "-score")),
        (lambda: cc.RetrievalThreshold(0.1).fit(0 * SCORE, RIGHT), cc.InputError, ("10 wrong", "better score")),
        (lambda: cc.RetrievalThreshold(0.11).fit(0 * SCORE, RIGHT), cc.InputError, ("about 1,700 queries",)),
        (lambda: cc.RetrievalThreshold(0.1).fit(SCORE, ~(SCORE < N)), cc.InputError, ("wrong", "better score")),
        (lambda: cc.RetrievalThreshold(0.1).fit(SCORE * np.nan, RIGHT), cc.InputError, ("score", "100 of 100 NaN")),
        (lambda: cc.RetrievalThreshold(0.1).fit(SCORE, RIGHT[1:]), cc.InputError, ("right", "(100,)", "(99,)")),
        (lambda: cc.RetrievalThreshold(0.1).fit(SCORE, SCORE), cc.InputTypeError, ("right", "float64")),
        (lambda: cc.RetrievalThreshold(0.1).fit(SCORE.tolist(), RIGHT), cc.InputTypeError, ("score", "list")),  # type: ignore[arg-type]
        (lambda: cc.MatchThreshold(0), cc.InputError, ("false_match_rate", "0")),
        (lambda: cc.MatchThreshold().fit(SCORE, ~RIGHT), cc.InputError, ("same", "999 pairs of two classes", "90")),
        (lambda: cc.MatchThreshold(0.1).fit(SCORE, SCORE < 0), cc.InputError, ("same", "pairs of one class")),
        (lambda: cc.MatchThreshold(0.1).fit(-SCORE, ~RIGHT), cc.InputError, ("scores", "AUROC 0.00", "-score")),
        (lambda: cc.MatchThreshold(0.1).fit(SCORE, ~RIGHT, np.zeros(N, int)), cc.InputError, ("groups", "(100, 2)")),
        (lambda: cc.MatchThreshold(0.1).fit(SCORE, ~RIGHT, SCORE), cc.InputTypeError, ("groups", "integers")),  # type: ignore[arg-type]
        (lambda: metrics.equal_error_rate(SCORE, SCORE < 0), cc.InputError, ("same", "two classes alone")),
    ],
)
def test_refusals(call: Callable[[], Any], kind: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value), caught.value
