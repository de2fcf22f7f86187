"""Which queries are answered: P(right) from all evidence, and limits that keep stated rates of errors."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.decisions.fitted import percent
from contrastive_curvature.decisions.retrieval import RetrievalThreshold
from contrastive_curvature.embedding.known import points_needed
from contrastive_curvature.errors import InputError
from contrastive_curvature.retriever.evidence import COLUMNS

_Numbers = NDArray[np.float64]

_RIDGE = 1.0
"""Penalty of the weights, of standardised columns."""

_ABSENT = 0.1
"""Weight of a held-out query without its class. Measured: ``docs/statistics.md``."""

_FOLDS = 5

_ROUNDING = 1e-5
"""Relative rounding of a novelty, in batches of another size: one of a repeated input counts as equal."""


@dataclass(frozen=True, eq=False)
class Regression:
    """P(right), by a logistic regression whose weights have the signs of :data:`.COLUMNS`.

    Attributes:
        location: Mean of the evidence, shape (6,).
        scale: Its standard deviation, shape (6,).
        weights: Of the standardised evidence, and the intercept, shape (7,).
    """

    location: _Numbers
    scale: _Numbers
    weights: _Numbers

    @classmethod
    def fitted(
        cls, evidence: _Numbers, right: NDArray[np.bool_], absent: _Numbers, share: float = _ABSENT
    ) -> Regression:
        """Fit the weights.

        Args:
            evidence: Of N held-out queries, shape (N, 6).
            right: Whether their matches are right, shape (N,).
            absent: Their evidence without their class in the gallery, where no match is right, shape (N, 6).
            share: Weight of each of the latter.
        """
        from scipy.optimize import minimize

        location, scale = evidence.mean(0), evidence.std(0)
        # What is the same for all queries says nothing.
        scale = np.where(scale > 1e-9, scale, np.inf)
        rows = np.vstack([evidence, absent])
        a = np.column_stack([(rows - location) / scale, np.ones(len(rows))])
        so = np.concatenate([right, np.zeros(len(absent))])
        times = np.repeat([1, share], [len(evidence), len(absent)])
        penalty = np.append(np.full(len(COLUMNS), _RIDGE), 0.0)

        def loss(w: _Numbers) -> tuple[float, _Numbers]:
            z = a @ w
            slope = times * (np.exp(-np.logaddexp(0, -z)) - so)
            value = float(times @ (np.logaddexp(0, z) - so * z) + penalty @ w**2 / 2)
            return value, a.T @ slope + penalty * w

        bounds = [(0, None) if sign > 0 else (None, 0) for sign in COLUMNS.values()]
        found = minimize(loss, np.zeros(a.shape[1]), jac=True, bounds=[*bounds, (None, None)], method="L-BFGS-B")
        return cls(location, scale, found.x)

    def __call__(self, evidence: _Numbers) -> _Numbers:
        """Return minus the logit of P(right), shape (N,): higher means less trust."""
        return -((evidence - self.location) / self.scale @ self.weights[:-1] + self.weights[-1])


class Rates(NamedTuple):
    """The errors that are asked for, each in (0, 1), or ``None``; see :class:`contrastive_curvature.Retriever`."""

    wrong_answers: float | None
    false_matches: float | None
    false_alarms: float | None
    confidence: float


class Labelled(NamedTuple):
    """Evidence of N labelled queries, and whether their matches are right.

    Attributes:
        evidence: Shape (N, 6).
        right: Shape (N,).
        novelty: Shape (N,).
    """

    evidence: _Numbers
    right: NDArray[np.bool_]
    novelty: _Numbers


@dataclass(frozen=True, eq=False)
class Rule:
    """What it takes to be answered.

    Attributes:
        regression: Of P(right).
        novelties: Of the held-out queries, ascending, shape (N,).
        false_alarms: Largest p-value of an unknown input; ``None`` where none is.
        limit: Largest score that is answered.
        answered: Share of the held-out queries that are answered.
        reasons: Why a rate lets nothing be answered, or nothing be unknown, by its name.
    """

    regression: Regression
    novelties: _Numbers
    false_alarms: float | None
    limit: float
    answered: float
    reasons: dict[str, str]

    def p_value(self, novelty: _Numbers) -> _Numbers:
        """Return the shares (N,) of the held-out queries that are at least as novel, the query itself counted in."""
        return _p_value(self.novelties, novelty)

    def decision(self, score: _Numbers, p_value: _Numbers) -> NDArray[np.str_]:
        """Return ``"answer"``, ``"unsure"`` or ``"unknown"`` for each score and p-value, shape (N,)."""
        answered = np.where(score <= self.limit, "answer", "unsure")
        return answered if self.false_alarms is None else np.where(p_value <= self.false_alarms, "unknown", answered)


def certified(
    rates: Rates, held: Labelled, absent: _Numbers, feedback: Labelled | None = None, ceiling: float = math.inf
) -> Rule:
    """Fit P(right) to held-out queries, and find the largest limit that keeps all rates.

    Each held-out query is scored by a regression on the other four fifths of them, and the limit is used with the
    regression on all: in simulations that keeps the rates (``docs/statistics.md``), it is no proof.

    ``false_matches``: the limit is the ``floor(rate (N + 1))``-th smallest score of N queries without their class, as
    conformal p-values have it. ``wrong_answers``: of the queries that this leaves, limits are tested upwards
    by :class:`.RetrievalThreshold`, so that the final one is among those tested.

    Args:
        rates: What is asked for.
        held: N held-out queries, drawn as the queries to come.
        absent: Their evidence without their class in the gallery, shape (N, 6).
        feedback: Labelled queries that were answered. They are drawn from what a limit accepts, so they can say that it
            is too high, and nothing of a higher one.
        ceiling: Largest limit under which they were answered, for the same score.
    """
    n = len(held.right)
    regression = Regression.fitted(held.evidence, held.right, absent)
    score, lacking = np.empty(n), np.empty(n)
    # Not in their order, in which classes or days may follow each other.
    fold = np.random.default_rng(0).permutation(n) % min(_FOLDS, n)
    for k in range(min(_FOLDS, n)):
        inside, others = fold == k, fold != k
        one = Regression.fitted(held.evidence[others], held.right[others], absent[others])
        score[inside], lacking[inside] = one(held.evidence[inside]), one(absent[inside])
    novelties, reasons = np.sort(held.novelty), {}
    known = np.full(n, True)
    if rates.false_alarms is not None:
        known = _p_value(novelties, held.novelty) > rates.false_alarms
        if 1 / (n + 1) > rates.false_alarms:
            reasons["false_alarms"] = f"no query is unknown: {_needs(rates.false_alarms, n)}"
    limit = math.inf
    if rates.false_matches is not None:
        k = math.floor(rates.false_matches * (n + 1) + 1e-9)
        limit = float(np.sort(np.where(known, lacking, np.inf))[k - 1]) if k else -math.inf
        if not k:
            reasons["false_matches"] = f"nothing is answered: {_needs(rates.false_matches, n)}"
    if rates.wrong_answers is not None and limit > -math.inf:
        threshold = RetrievalThreshold(rates.wrong_answers, confidence=rates.confidence)
        scores, right = score[known], held.right[known]
        tested = scores <= limit
        try:
            limit = threshold.fit(scores[tested], right[tested]).threshold
            if feedback is not None:
                limit = min(limit, ceiling)
                scores, right = np.append(scores, regression(feedback.evidence)), np.append(right, feedback.right)
                tested = scores <= limit
                limit = threshold.fit(scores[tested], right[tested]).threshold
        except InputError:
            limit = -math.inf
            found = f"{(~right[tested]).sum():,} of the {tested.sum():,} that the other rates let be answered are wrong"
            times = _times(threshold, scores[tested], right[tested])
            hint = "It takes a larger rate, or a better encoder"
            if times:
                hint = f"It takes about {times * n:,} held-out queries like these, or a larger rate"
            reasons["wrong_answers"] = f"nothing is answered: of {n:,} held-out queries, {found}. {hint}"
    return Rule(regression, novelties, rates.false_alarms, limit, float((known & (score <= limit)).mean()), reasons)


def _p_value(novelties: _Numbers, novelty: _Numbers) -> _Numbers:
    n = len(novelties)
    return (1 + n - np.searchsorted(novelties, novelty * (1 - _ROUNDING))) / (n + 1)


def _times(threshold: RetrievalThreshold, score: _Numbers, right: NDArray[np.bool_]) -> int | None:
    """Return how many times as many queries, with the same scores and errors, allow a limit; ``None`` for over 64."""
    for times in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
        with contextlib.suppress(InputError):
            threshold.fit(np.tile(score, times), np.tile(right, times))
            return times
    return None


def _needs(rate: float, n: int) -> str:
    return f"{percent(rate)} takes at least {points_needed(rate):,} held-out queries, and there are {n:,}"
