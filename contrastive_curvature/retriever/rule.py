"""Which queries are answered: P(right) from all evidence, and limits that keep stated rates of errors."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.decisions.fitted import percent
from contrastive_curvature.decisions.retrieval_threshold import RetrievalThreshold
from contrastive_curvature.embedding.known import points_needed
from contrastive_curvature.errors import InputError
from contrastive_curvature.retriever.evidence import COLUMNS, FLOOR, Searched

_Numbers = NDArray[np.float64]

RIGHT = 0.1, np.where([name == "gap" for name in COLUMNS], 0.1, 10.0)
"""P(right): weight of a held-out query without its class, and penalty of the weight of each standardised column. The
gap alone orders the surest answers well, so that the others have to earn their weights."""

PRESENT = 1.0, np.ones(len(COLUMNS))
"""As :data:`RIGHT`, of the score that says whether the gallery has the class. Both measured: ``docs/statistics.md``."""

_SAME = math.log(1.001 * FLOOR)
"""Log-distance to a match below which the query is the match."""

_FOLDS = 5

_MANY = 60
"""Classes from which the rate of classes taken out was near the rate of classes that nobody knows, in trials."""

ROUNDING = 1e-5
"""Relative rounding of a novelty, in batches of another size: one of a repeated input counts as equal."""


@dataclass(frozen=True, eq=False)
class Regression:
    """A logistic regression whose weights have the signs of :data:`.COLUMNS`.

    Attributes:
        location: Mean of the evidence, shape (6,).
        scale: Standard deviation of the evidence, shape (6,).
        weights: Weights of the standardised evidence, and the intercept, shape (7,).
    """

    location: _Numbers
    scale: _Numbers
    weights: _Numbers

    @classmethod
    def fitted(
        cls, evidence: _Numbers, right: NDArray[np.bool_], absent: _Numbers, share: float, ridge: _Numbers
    ) -> Regression:
        """Fit the weights, in favour of right matches.

        Args:
            evidence: Evidence of N held-out queries, shape (N, 6).
            right: Whether their matches are right, shape (N,).
            absent: Their evidence without their class in the gallery, where no match is right, shape (N, 6).
            share: Weight of each query without its class.
            ridge: Penalty of the weights of standardised columns, shape (6,).
        """
        from scipy.optimize import minimize

        location, scale = evidence.mean(0), evidence.std(0)
        # A column that is the same for all queries says nothing.
        scale = np.where(scale > 1e-9, scale, np.inf)
        rows = np.vstack([evidence, absent])
        a = np.column_stack([(rows - location) / scale, np.ones(len(rows))])
        so = np.concatenate([right, np.zeros(len(absent))])
        times = np.repeat([1, share], [len(evidence), len(absent)])
        penalty = np.append(ridge, 0.0)

        def loss(w: _Numbers) -> tuple[float, _Numbers]:
            z = a @ w
            slope = times * (np.exp(-np.logaddexp(0, -z)) - so)
            value = float(times @ (np.logaddexp(0, z) - so * z) + penalty @ w**2 / 2)
            return value, a.T @ slope + penalty * w

        bounds = [(0, None) if sign > 0 else (None, 0) for sign in COLUMNS.values()]
        found = minimize(loss, np.zeros(a.shape[1]), jac=True, bounds=[*bounds, (None, None)], method="L-BFGS-B")
        return cls(location, scale, found.x)

    def __call__(self, evidence: _Numbers) -> _Numbers:
        """Return minus the logit, shape (N,): higher means less trust."""
        return -((evidence - self.location) / self.scale @ self.weights[:-1] + self.weights[-1])


class Rates(NamedTuple):
    """What is asked for: rates of errors in (0, 1), or ``None``; see :class:`contrastive_curvature.Retriever`."""

    wrong_answers: float | None
    false_matches: float | None
    false_alarms: float | None
    confidence_level: float
    by_class: bool = False

    def threshold(self) -> RetrievalThreshold:
        """Return the test of ``wrong_answers``, not fitted."""
        return RetrievalThreshold(self.wrong_answers, confidence_level=self.confidence_level)  # type: ignore[arg-type]


class Ranks(NamedTuple):
    """Queries of classes that an encoder was not trained on, among the held-out queries of that encoder.

    Attributes:
        ranks: Shares of the held-out queries whose score is at most that of the query, shape (N,).
        classes: Numbers of the queries' classes, int64, shape (N,).
        present: Regression that separates right matches from such queries.
    """

    ranks: _Numbers
    classes: NDArray[np.int64]
    present: Regression


class Statement(NamedTuple):
    """What the rate of false matches holds for.

    Attributes:
        holds: One of :data:`HOLDS`.
        classes: Number C of the classes whose queries set the limit.
        average: (sum over the classes of the share of their queries within the limit + 1) / (C + 1): for a new class
            that is exchangeable with them, the mean share is at most about this (conformal risk control).
        taken_out: Share of the held-out queries within the limit that classes taken out of the gallery give.
    """

    holds: str
    classes: int
    average: float
    taken_out: float

    def said(self, rate: float) -> str:
        """Say what the rate holds for, and what it takes to certify it over classes."""
        if self.holds == HOLDS[0]:
            return f"the same holds for classes that nobody knows, on average over classes like these {self.classes:,}"
        if self.holds == HOLDS[2]:
            return (
                f"these are {self.classes:,} classes taken out of the gallery: if the encoder was trained on them, "
                f"more queries are answered of classes that nobody knows (nearly as few from about {_MANY} classes on)"
            )
        enough = points_needed(rate) <= self.classes
        more = f"by_class=True certifies {percent(rate)} over classes" if enough else _needs_classes(rate, self.classes)
        most = percent(max(rate, self.average))
        like = f"of classes that nobody knows, on average over classes like these {self.classes:,}"
        return f"{like}, at most {most} ({more})"


HOLDS = ("certified over classes", "on average over classes", "classes taken out of the gallery")


@dataclass(frozen=True, eq=False)
class Rule:
    """The limits of a fitted retriever: they decide whether a query is answered.

    Attributes:
        right: Regression for P(right).
        limit: Largest score of ``right`` that is answered.
        present: Regression that separates right matches from matches of queries whose class is taken out.
        present_limit: Largest score of ``present`` that is answered.
        further: A second such regression, from other trainings, and its largest score; ``None`` without them.
        novelties: Novelties of the held-out queries, ascending, shape (N,).
        false_alarms: Largest p-value that is called unknown; ``None`` if no query is called unknown.
        answered: Share of the held-out queries that are answered.
        kept_back: Share of the held-out queries that each rate alone keeps back, by the name of the rate.
        reasons: Reasons why nothing is answered, or nothing is called unknown, by the name of the rate.
        in_gallery: Share of the held-out queries that are points of the gallery.
        statement: What the rate of false matches holds for; ``None`` if none is asked for.
    """

    right: Regression
    limit: float
    present: Regression
    present_limit: float
    further: tuple[Regression, float] | None
    novelties: _Numbers
    false_alarms: float | None
    answered: float
    kept_back: dict[str, float]
    reasons: dict[str, str]
    in_gallery: float
    statement: Statement | None

    def price(self, name: str) -> str:
        """Say what a rate would keep back with the limit of classes taken out of the gallery, if it has another one."""
        if name != "false_matches" or self.statement is None or self.statement.holds == HOLDS[2]:
            return ""
        return f" ({percent(1 - self.statement.taken_out)} with the limit of classes taken out of the gallery)"

    def p_value(self, novelty: _Numbers) -> _Numbers:
        """Return the shares (N,) of the held-out queries that are at least as novel, the query itself counted in."""
        return _p_value(self.novelties, novelty)

    def decision(self, found: Searched) -> NDArray[np.str_]:
        """Return ``"answer"``, ``"unsure"`` or ``"unknown"``, shape (N,)."""
        has_class = _within(self.present(found.present), self.present_limit, self.further, found)
        sure = (self.right(found.evidence) <= self.limit) & has_class
        answered = np.where(sure, "answer", "unsure")
        if self.false_alarms is None:
            return answered
        return np.where(self.p_value(found.novelty) <= self.false_alarms, "unknown", answered)


def certified(
    rates: Rates,
    held: Searched,
    absent: Searched,
    feedback: Searched | None = None,
    ceiling: float = math.inf,
    unseen: Searched | Ranks | None = None,
) -> Rule:
    """Fit two scores to held-out queries, and find the largest limits that keep all rates.

    Each held-out query is scored by regressions on the other four fifths of them, and the limits are used with the
    regressions on all. Simulations show that this keeps the rates (``docs/statistics.md``); it is not proven.

    ``false_matches``: the limit of ``present`` is the ``floor(rate (N + 1))``-th smallest score of N queries without
    their class, as for conformal p-values; ``by_class``, it is the largest one with (sum over C classes of the share
    within it + 1) / (C + 1) at most the rate. ``wrong_answers``: among the remaining queries, growing limits of
    ``right`` are tested by :class:`.RetrievalThreshold`.

    Args:
        rates: Rates that the limits must keep.
        held: N held-out queries with labels, drawn like future queries.
        absent: The held-out queries without their class in the gallery, where no match is right.
        feedback: Labelled queries that were answered. They come from the queries that a limit accepts, so they can show
            that the limit is too high, but not that a higher limit would do.
        ceiling: Largest limit of ``right`` under which the feedback was answered, for the same score.
        unseen: Queries of classes that neither the encoder nor the gallery has, or their ranks among the held-out
            queries. The limit of ``present`` keeps the rate for them too; ``None`` if there are none.

    Source: Angelopoulos et al. (2022), arXiv 2208.02814, for ``by_class``.
    """
    n, is_right = len(held), held.right
    right, score, _ = crossfitted(held.evidence, is_right, absent.evidence, RIGHT)
    fitted = crossfitted(held.present, is_right, absent.present, PRESENT)
    present, near, _ = fitted
    novelties, reasons = np.sort(held.novelty), {}
    known = np.full(n, True)
    if rates.false_alarms is not None:
        known = _p_value(novelties, held.novelty) > rates.false_alarms
        if 1 / (n + 1) > rates.false_alarms:
            reasons["false_alarms"] = f"no query is unknown: {_needs(rates.false_alarms, n)}"
    present_limit, further, statement = math.inf, None, None
    if rates.false_matches is not None:
        present_limit, further, statement, why = _limits_of_present(rates, held, absent, unseen, fitted, known)
        reasons |= {"false_matches": why} if why else {}
    has_class = _within(near, present_limit, further, held)
    left, limit = known & has_class, math.inf
    if rates.wrong_answers is not None and "false_matches" not in reasons:
        answered = None
        if feedback is not None:
            inside = _within(present(feedback.present), present_limit, further, feedback)
            answered = right(feedback.evidence[inside]), feedback.right[inside]
        limit, why = _limit_of_right(rates, held, score[left], is_right[left], answered, ceiling)
        reasons |= {"wrong_answers": why} if why else {}
    sides = {"wrong_answers": score > limit, "false_matches": ~has_class, "false_alarms": ~known}
    kept_back = {name: float(side.mean()) for name, side in sides.items()}
    share = float((left & (score <= limit)).mean())
    in_gallery = float((held.evidence[:, 0] < _SAME).mean())
    return Rule(
        right, limit, present, present_limit, further, novelties, rates.false_alarms, share, kept_back, reasons,
        in_gallery, statement,
    )  # fmt: skip


def _limits_of_present(
    rates: Rates,
    held: Searched,
    absent: Searched,
    unseen: Searched | Ranks | None,
    fitted: tuple[Regression, _Numbers, _Numbers],
    known: NDArray[np.bool_],
) -> tuple[float, tuple[Regression, float] | None, Statement, str | None]:
    """Find the largest limits that keep the rate of false matches.

    Args:
        rates: See :func:`certified`, like ``held``, ``absent`` and ``unseen``.
        held: N queries.
        absent: See there.
        unseen: See there.
        fitted: The score that a class is in the gallery, and its values (N,) with and without the class.
        known: Which held-out queries are not called unknown, (N,).

    Returns:
        The limit of the score, a further score with its limit if there are ranks, what holds, and why nothing is
        answered, if so.
    """
    rate, (present, near, lacking) = rates.false_matches, fitted
    assert rate is not None
    # With queries of new classes, those of classes taken out of the gallery count one by one.
    usual = rates._replace(by_class=rates.by_class and unseen is None)

    def largest_taken_out(lacking: _Numbers) -> float:
        return _largest(usual, np.where(known, lacking, np.inf), held.classes)

    limit, further = largest_taken_out(lacking), None
    if isinstance(unseen, Ranks):
        scores, of, new = unseen
        largest = _largest(rates, scores, of)
        k = math.floor(min(largest, 1) * len(held) + 1e-9) if largest > 0 else 0
        further = new, float(np.sort(new(held.present))[k - 1]) if k else -math.inf
    elif unseen is not None:
        told = rates.false_alarms is None or _p_value(np.sort(held.novelty), unseen.novelty) > rates.false_alarms
        may = told & _within(present(unseen.present), math.inf, None, unseen)
        scores, of = np.where(may, present(unseen.present), np.inf), unseen.classes
        largest = _largest(rates, scores, of)
        limit = min(limit, largest)
    else:
        scores, of, largest = np.where(known, lacking, np.inf), held.classes, limit
    above = near, lacking
    if held.below is not None:
        above = crossfitted(held.evidence, held.right, absent.evidence, PRESENT)[1:]
    answered_above = float((above[0] <= largest_taken_out(above[1])).mean())
    c = len(np.unique(of))
    average = (_by_class((scores <= largest) & np.isfinite(scores), of).sum() + 1) / (c + 1)
    assumed = held.below is None and unseen is None
    holds = HOLDS[2 if assumed else 0 if rates.by_class else 1]
    why = None
    if -math.inf in (limit, *(further or ())):
        hint = _needs_classes(rate, c) if rates.by_class else _needs(rate, min(len(held), len(scores)))
        why = f"nothing is answered: {hint}"
    return limit, further, Statement(holds, c, average, answered_above), why


def _limit_of_right(
    rates: Rates,
    held: Searched,
    scores: _Numbers,
    correct: NDArray[np.bool_],
    answered: tuple[_Numbers, NDArray[np.bool_]] | None,
    ceiling: float,
) -> tuple[float, str | None]:
    """Find the largest limit that keeps the rate of wrong answers, and say why it lets nothing pass, if so.

    Args:
        rates: See :func:`certified`, like ``ceiling``.
        held: N queries.
        scores: Of the queries that the other rates let be answered, (M,).
        correct: Whether their matches are right, (M,).
        answered: Scores and right matches of the feedback.
        ceiling: See there.
    """
    threshold, limit, n = rates.threshold(), math.inf, len(held)
    try:
        limit = threshold.fit(scores, correct).threshold
        if answered is not None:
            limit = min(limit, ceiling)
            scores, correct = np.append(scores, answered[0]), np.append(correct, answered[1])
            limit = threshold.fit(scores[scores <= limit], correct[scores <= limit]).threshold
    except InputError:
        scores, correct = scores[scores <= limit], correct[scores <= limit]
        times = _times(threshold, scores, correct)
        hint = "It takes a larger rate, or a better encoder"
        if not held.right.any():
            hint = "No match has the label of its query: does the gallery name or number its classes in the same way?"
        elif times:
            hint = f"It takes about {times * n:,} held-out queries like these, or a larger rate"
        elif len(correct) < (least := threshold.least()):
            hint = f"Even if no answer is wrong, it takes {least:,} of them, or a larger rate"
        found = f"{(~correct).sum():,} of the {len(correct):,} that the other rates let be answered are wrong"
        return -math.inf, f"nothing is answered: of {n:,} held-out queries, {found}. {hint}"
    return limit, None


def crossfitted(
    held: _Numbers, right: NDArray[np.bool_], absent: _Numbers, how: tuple[float, _Numbers]
) -> tuple[Regression, _Numbers, _Numbers]:
    """Return a regression, and the scores (N,) of held-out queries, with and without their class, from other folds."""
    n = len(held)
    near, lacking = np.empty(n), np.empty(n)
    # At random, because the queries may be sorted by class or by day.
    fold = np.random.default_rng(0).permutation(n) % min(_FOLDS, n)
    for k in range(min(_FOLDS, n)):
        inside, others = fold == k, fold != k
        one = Regression.fitted(held[others], right[others], absent[others], *how)
        near[inside], lacking[inside] = one(held[inside]), one(absent[inside])
    return Regression.fitted(held, right, absent, *how), near, lacking


def _largest(rates: Rates, scores: _Numbers, classes: NDArray[np.int64]) -> float:
    """Return the largest limit of scores (N,) that keeps the rate of false matches; minus infinity if none does."""
    assert rates.false_matches is not None
    ordered = np.sort(scores)
    if not rates.by_class:
        k = math.floor(rates.false_matches * (len(scores) + 1) + 1e-9)
        return float(ordered[k - 1]) if k else -math.inf
    of, each = np.unique(classes, return_inverse=True, return_counts=True)[1:]
    order = np.argsort(scores)
    # Infinite scores are above every limit.
    sums = np.cumsum(np.where(np.isfinite(ordered), 1 / each[of[order]], 0))
    allowed = (np.append(0, sums) + 1) / (len(each) + 1) <= rates.false_matches + 1e-9
    if allowed.all():
        return math.inf
    return float(np.nextafter(ordered[allowed.sum() - 1], -np.inf)) if allowed[0] else -math.inf


def _by_class(happened: NDArray[np.bool_], classes: NDArray[np.int64]) -> _Numbers:
    """Return the share of the queries of each class that something happened to, shape (C,)."""
    return np.array([happened[classes == k].mean() for k in np.unique(classes)])


def _within(
    present: _Numbers, limit: float, further: tuple[Regression, float] | None, found: Searched
) -> NDArray[np.bool_]:
    """Return whether queries may be answered for all that is known of ``false_matches``, shape (N,).

    Below a head, the match must also have the class of the match that is answered.
    """
    near = present <= limit
    if further is not None:
        near &= further[0](found.present) <= further[1]
    return near if found.same is None else near & found.same


def _p_value(novelties: _Numbers, novelty: _Numbers) -> _Numbers:
    n = len(novelties)
    return (1 + n - np.searchsorted(novelties, novelty * (1 - ROUNDING))) / (n + 1)


def _times(threshold: RetrievalThreshold, score: _Numbers, right: NDArray[np.bool_]) -> int | None:
    """Return how many times as many queries, with the same scores and errors, allow a limit; ``None`` above 64."""
    for times in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
        with contextlib.suppress(InputError):
            threshold.fit(np.tile(score, times), np.tile(right, times))
            return times
    return None


def _needs_classes(rate: float, classes: int) -> str:
    return (
        f"certified over classes, {percent(rate)} takes at least {points_needed(rate):,} classes, and there are "
        f"{classes:,}, with which {percent(1 / (classes + 1))} is the smallest rate"
    )


def _needs(rate: float, n: int) -> str:
    return f"{percent(rate)} takes at least {points_needed(rate):,} held-out queries, and there are {n:,}"
