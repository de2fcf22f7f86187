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
    """The errors that are asked for, each in (0, 1), or ``None``; see :class:`contrastive_curvature.Retriever`."""

    wrong_answers: float | None
    false_matches: float | None
    false_alarms: float | None
    confidence_level: float

    def threshold(self) -> RetrievalThreshold:
        """Return the test of ``wrong_answers``, not fitted."""
        return RetrievalThreshold(self.wrong_answers, confidence_level=self.confidence_level)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Rule:
    """The limits of a fitted retriever: they decide whether a query is answered.

    Attributes:
        right: Regression for P(right).
        limit: Largest score of ``right`` that is answered.
        present: Regression that separates right matches from matches of queries whose class is taken out.
        present_limit: Largest score of ``present`` that is answered.
        novelties: Novelties of the held-out queries, ascending, shape (N,).
        false_alarms: Largest p-value that is called unknown; ``None`` if no query is called unknown.
        answered: Share of the held-out queries that are answered.
        kept_back: Share of the held-out queries that each rate alone keeps back, by the name of the rate.
        reasons: Reasons why nothing is answered, or nothing is called unknown, by the name of the rate.
        in_gallery: Share of the held-out queries that are points of the gallery.
    """

    right: Regression
    limit: float
    present: Regression
    present_limit: float
    novelties: _Numbers
    false_alarms: float | None
    answered: float
    kept_back: dict[str, float]
    reasons: dict[str, str]
    in_gallery: float

    def p_value(self, novelty: _Numbers) -> _Numbers:
        """Return the shares (N,) of the held-out queries that are at least as novel, the query itself counted in."""
        return _p_value(self.novelties, novelty)

    def decision(self, found: Searched) -> NDArray[np.str_]:
        """Return ``"answer"``, ``"unsure"`` or ``"unknown"``, shape (N,)."""
        has_class = _within(self.present(found.present), self.present_limit, found)
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
) -> Rule:
    """Fit two scores to held-out queries, and find the largest limits that keep all rates.

    Each held-out query is scored by regressions on the other four fifths of them, and the limits are used with the
    regressions on all. Simulations show that this keeps the rates (``docs/statistics.md``); it is not proven.

    ``false_matches``: the limit of ``present`` is the ``floor(rate (N + 1))``-th smallest score of N queries without
    their class, as for conformal p-values. ``wrong_answers``: among the remaining queries, growing limits of ``right``
    are tested by :class:`.RetrievalThreshold`.

    Args:
        rates: Rates that the limits must keep.
        held: N held-out queries with labels, drawn like future queries.
        absent: The held-out queries without their class in the gallery, where no match is right.
        feedback: Labelled queries that were answered. They come from the queries that a limit accepts, so they can show
            that the limit is too high, but not that a higher limit would do.
        ceiling: Largest limit of ``right`` under which the feedback was answered, for the same score.
    """
    n, is_right = len(held), held.right
    right, score, _ = _crossfitted(held.evidence, is_right, absent.evidence, RIGHT)
    present, near, lacking = _crossfitted(held.present, is_right, absent.present, PRESENT)
    novelties, reasons = np.sort(held.novelty), {}
    known = np.full(n, True)
    if rates.false_alarms is not None:
        known = _p_value(novelties, held.novelty) > rates.false_alarms
        if 1 / (n + 1) > rates.false_alarms:
            reasons["false_alarms"] = f"no query is unknown: {_needs(rates.false_alarms, n)}"
    limit = present_limit = math.inf
    if rates.false_matches is not None:
        k = math.floor(rates.false_matches * (n + 1) + 1e-9)
        present_limit = float(np.sort(np.where(known, lacking, np.inf))[k - 1]) if k else -math.inf
        if not k:
            reasons["false_matches"] = f"nothing is answered: {_needs(rates.false_matches, n)}"
    has_class = _within(near, present_limit, held)
    left = known & has_class
    if rates.wrong_answers is not None and present_limit > -math.inf:
        threshold = rates.threshold()
        scores, correct = score[left], is_right[left]
        try:
            limit = threshold.fit(scores, correct).threshold
            if feedback is not None:
                limit = min(limit, ceiling)
                answered = _within(present(feedback.present), present_limit, feedback)
                scores = np.append(scores, right(feedback.evidence[answered]))
                correct = np.append(correct, feedback.right[answered])
                limit = threshold.fit(scores[scores <= limit], correct[scores <= limit]).threshold
        except InputError:
            scores, correct = scores[scores <= limit], correct[scores <= limit]
            limit = -math.inf
            found = f"{(~correct).sum():,} of the {len(correct):,} that the other rates let be answered are wrong"
            times = _times(threshold, scores, correct)
            hint = "It takes a larger rate, or a better encoder"
            if not is_right.any():
                hint = (
                    "No match has the label of its query: does the gallery name or number its classes in the same way?"
                )
            elif times:
                hint = f"It takes about {times * n:,} held-out queries like these, or a larger rate"
            elif len(correct) < (least := threshold.least()):
                hint = f"Even if no answer is wrong, it takes {least:,} of them, or a larger rate"
            reasons["wrong_answers"] = f"nothing is answered: of {n:,} held-out queries, {found}. {hint}"
    sides = {"wrong_answers": score > limit, "false_matches": ~has_class, "false_alarms": ~known}
    kept_back = {name: float(side.mean()) for name, side in sides.items()}
    share = float((left & (score <= limit)).mean())
    same = float((held.evidence[:, 0] < _SAME).mean())
    return Rule(right, limit, present, present_limit, novelties, rates.false_alarms, share, kept_back, reasons, same)


def _crossfitted(
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


def _within(present: _Numbers, limit: float, found: Searched) -> NDArray[np.bool_]:
    """Return whether queries may be answered for all that is known of ``false_matches``, shape (N,).

    Below a head, the match must also have the class of the match that is answered.
    """
    return present <= limit if found.same is None else (present <= limit) & found.same


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


def _needs(rate: float, n: int) -> str:
    return f"{percent(rate)} takes at least {points_needed(rate):,} held-out queries, and there are {n:,}"
