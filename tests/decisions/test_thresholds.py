"""Thresholds with a stated error: their promises over many splits, oracles of single numbers, refusals."""

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom, binomtest
from sklearn.metrics import roc_curve
from tables import each

import contrastive_curvature as cc
from contrastive_curvature import metrics

SPLITS = 600
SETS = int(os.environ.get("SETS", "200"))
"""Of images of persons; 600 for all figures of docs/statistics.md."""
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
                found.append(cc.RetrievalThreshold(0.05, kind, 0.9).fit(score, right).threshold)
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


def likeness(rng: np.random.Generator, of: NDArray[Any], pairs: NDArray[Any], how: str) -> NDArray[Any]:
    """Scores of pairs of images of the persons ``of``, who differ in how much they look like others."""
    n, (left, right) = of.max() + 1, pairs.T
    if how == "spreads":  # cosines of embeddings, with standard deviations from .3 to 1.5 about the persons' means
        mean, spread = rng.normal(size=(n, 16)), np.exp(rng.uniform(np.log(0.3), np.log(1.5), n))
        mean[:, 0] += 2 * rng.exponential(size=n)
        image = mean[of] + spread[of, None] * rng.normal(size=(len(of), 16))
        image /= np.linalg.norm(image, axis=1, keepdims=True)
        return np.einsum("ij,ij->i", image[left], image[right])
    kind = 0.5 * (rng.normal(size=n) if how == "kinds" else rng.exponential(size=n))
    return kind[of[pairs]].sum(1) + (of[left] == of[right]) + rng.normal(size=len(pairs))


def test_false_matches_are_as_seldom_as_promised() -> None:
    rng = np.random.default_rng(2)
    same = np.arange(260) < 10
    rates = [1 - cc.MatchThreshold(0.02).fit(rng.random(260) + same, same).threshold for _ in range(SPLITS)]
    assert abs(np.mean(rates) - 5 / 251) < 4 * math.sqrt(5 * 246 / 251**2 / 252 / SPLITS)  # of Beta(5, 246)


# Two images of new persons each, and two persons: what share of pairs a threshold errs on.
MANY = np.arange(400_000)
PAIRS = MANY.reshape(-1, 2)


LIKENESS = [
    ("spreads", 21, 4, 0.01, 1.1, 0.92),
    ("tails", 15, 4, 0.01, 1.6, 0.83),
    ("kinds", 40, 2, 0.01, 1.1, 0.94),
    ("spreads", 15, 4, 0.01, 1.2, 0.91),
    ("spreads", 40, 2, 0.01, 1.1, 0.93),
    ("spreads", 64, 2, 0.001, 1.2, 0.9),
    ("tails", 40, 2, 0.01, 1.3, 0.88),
]


@each("how, persons, images, rate, mean, covered", LIKENESS if SETS > 200 else LIKENESS[:2])
@pytest.mark.filterwarnings("ignore:groups. 105 pairs of persons are few")
def test_rates_and_intervals_hold_where_pairs_share_persons(how, persons, images, rate, mean, covered) -> None:
    rng = np.random.default_rng(2)
    falsely, truly = (np.sort(likeness(rng, of, PAIRS, how)) for of in (MANY, MANY // 2))
    of = np.repeat(np.arange(persons), images)
    pairs = np.stack(np.triu_indices(len(of), 1), axis=1)
    same = of[pairs[:, 0]] == of[pairs[:, 1]]
    rates, inside, narrow = [], [], []
    for _ in range(SETS):
        scores = likeness(rng, of, pairs, how)
        fitted = cc.MatchThreshold(rate).fit(scores, same, of[pairs])
        matched, missed = (np.searchsorted(few, fitted.threshold, "right") / len(few) for few in (falsely, truly))
        rates.append(1 - matched)
        intervals = (fitted.false_match_interval, fitted.false_non_match_interval)
        inside.append([low <= true <= high for (low, high), true in zip(intervals, (rates[-1], missed), strict=True)])
        alone = cc.MatchThreshold(rate).fit(scores, same)
        true = 1 - np.searchsorted(falsely, alone.threshold, "right") / len(falsely)
        narrow.append((true, alone.false_match_interval[0] <= true <= alone.false_match_interval[1]))
    share, without = np.mean(inside, axis=0), np.mean(narrow, axis=0)
    print(  # the figures of docs/statistics.md: SETS=600 pytest -s
        f"{how}, {persons} persons with {images} images, rate {rate:g}: mean {np.mean(rates):.5f} "
        f"(standard error {np.std(rates) / math.sqrt(SETS):.5f}), interval holds in {share[0]:.1%}, that of the "
        f"false non-match rate in {share[1]:.1%}; without groups {without[0]:.5f}, {without[1]:.1%}"
    )
    assert np.mean(rates) < mean * rate
    assert share[0] > covered
    assert share[1] > 0.92
    assert without[1] < 0.8  # without the persons, intervals are too narrow


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
    # Every person in one pair: the sum of squares is that of independent pairs, up to the one that is left out.
    assert grouped.threshold == fitted.threshold
    assert grouped.false_non_match_interval == pytest.approx(fitted.false_non_match_interval, rel=1e-3)
    assert grouped.false_match_interval == pytest.approx(fitted.false_match_interval, rel=1e-2)
    # Nearly every person is missed once in two: the interval is no narrower than that of independent pairs.
    even, low = np.arange(300) < 100, np.where(np.arange(300) < 51, -9.0, 9.0)
    of = np.stack([np.where(even, np.arange(300) % 50, np.arange(300))] * 2, 1)
    balanced = cc.MatchThreshold(0.1).fit(np.where(even, low, np.arange(300) / 300), even, of)
    oracle = binomtest(51, 100).proportion_ci(0.95, "exact")
    assert balanced.false_non_match_interval == pytest.approx((oracle.low, oracle.high), rel=1e-9)
    # Nobody is missed: 100 people count as 100 pairs, of however many images.
    clear = cc.MatchThreshold(0.1).fit(scores + 20 * same, same, np.stack([np.arange(1999) % 100] * 2, 1))
    assert clear.false_non_match_interval == (0, pytest.approx(1 - 0.025**0.01))


def test_pairs_are_judged_by_pairs_of_other_persons() -> None:
    rng = np.random.default_rng(5)
    for rate, levels in ((0.05, 10_000), (0.1, 10_000), (0.2, 30)):  # the last with ties
        left, right = np.triu_indices(12, 1)
        persons = np.stack([left, right], 1)[rng.permutation(66)] % 9  # some pairs twice, some of a person with itself
        scores = np.floor(levels * (rng.normal(size=66) + 0.5 * rng.normal(size=9)[persons].sum(1)))
        n, count = 66, math.floor(rate * 67)
        apart = ~(persons[:, None, :, None] == persons[None, :, None, :]).any((2, 3))
        p = (1 + (apart & (scores >= scores[:, None])).sum(1)) / (1 + apart.sum(1))
        level = min(max(q for q in p if (p <= q).sum() <= count), count / (n + 1))
        with pytest.warns(UserWarning, match="groups: 3. pairs of persons are few") if rate < 0.06 else nullcontext():
            fitted = cc.MatchThreshold(rate).fit(
                np.append(scores, 1e9), np.arange(n + 1) == n, np.append(persons, [[0, 0]], 0)
            )
        assert fitted.threshold == np.sort(scores)[-math.floor(level * (n + 1) + 1e-9)]


def test_a_probe_against_a_gallery_has_no_other_persons() -> None:
    scores, same = np.append(np.arange(100.0), 200), np.arange(101) == 100
    persons = np.stack([np.zeros(101, int), np.arange(101)], 1)
    assert cc.MatchThreshold(0.05).fit(scores, same, persons).threshold == np.sort(scores)[-1 - 5]


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
        (lambda: cc.RetrievalThreshold(0.1, "some"), cc.InputError, ("among", "'answered'", "'all'", "some")),
        (lambda: cc.RetrievalThreshold().threshold, cc.NotFittedError, ("threshold", "fit(...)")),
        (lambda: cc.RetrievalThreshold().limit, AttributeError, ("limit",)),
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
        (lambda: cc.RetrievalThreshold(0.1).fit(SCORE.tolist(), RIGHT), cc.InputTypeError, ("score", "list")),
        (lambda: cc.RetrievalThreshold(0.1).fit(SCORE + 0j, RIGHT), cc.InputTypeError, ("score", "complex")),
        (
            lambda: cc.RetrievalThreshold(0.1).fit(np.ma.MaskedArray(np.asarray(SCORE), np.asarray(SCORE) > 1), RIGHT),
            cc.InputTypeError,
            ("score", "without a mask"),
        ),
        (lambda: cc.MatchThreshold(0), cc.InputError, ("false_match_rate", "0")),
        (lambda: cc.MatchThreshold().fit(SCORE, ~RIGHT), cc.InputError, ("same", "999 pairs of two classes", "90")),
        (lambda: cc.MatchThreshold(0.1).fit(SCORE, SCORE < 0), cc.InputError, ("same", "pairs of one class")),
        (lambda: cc.MatchThreshold(0.1).fit(-SCORE, ~RIGHT), cc.InputError, ("scores", "AUROC 0.00", "-score")),
        (lambda: cc.MatchThreshold(0.1).fit(SCORE, ~RIGHT, np.zeros(N, int)), cc.InputError, ("groups", "(100, 2)")),
        (lambda: cc.MatchThreshold(0.1).fit(SCORE, ~RIGHT, SCORE), cc.InputTypeError, ("groups", "integers")),
        (lambda: metrics.equal_error_rate(SCORE, SCORE < 0), cc.InputError, ("same", "two classes alone")),
    ],
)
def test_refusals(call: Callable[[], Any], kind: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value), caught.value
