"""Decide which queries to answer, so that few answers are wrong."""

from __future__ import annotations

import math
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.decisions.fitted import FittedAttributes, one_of_each, percent, refuse_reversed
from contrastive_curvature.errors import InputError
from contrastive_curvature.metrics._checks import Array, like, numbers, truths

_TWO_STARTS = 4
"""With so many times the queries that a first test accepts, a second one starts at half (docs/statistics.md)."""


class RetrievalThreshold(FittedAttributes):
    """Threshold of a score up to which queries are answered, with a stated share of wrong answers.

    It holds for new queries that are drawn like the queries of the fit, and a gallery that is searched in the same way.
    ``among="answered"``: at most a share ``risk`` of the answers is wrong, with probability ``confidence_level`` over
    the queries of the fit. Thresholds are tested upwards with the exact binomial tail until one fails. The first test
    accepts the smallest number of queries among which one may be wrong. With many queries, a second sequence starts at
    half of them, and each sequence has half the error probability. ``among="all"``: wrong answers are at most a share
    ``risk`` of all queries, answered or not, on average over the queries of the fit; this answers more queries.

    Args:
        risk: Largest share of wrong answers, in (0, 1).
        among: Queries that ``risk`` is a share of: ``"answered"`` or ``"all"``.
        confidence_level: Probability, in (0, 1), that the threshold keeps the risk among the answered queries.

    Attributes:
        threshold: Largest score that is answered.
        answered: Share of the fit's queries that are answered.
        queries: Number of queries of the fit, or of groups.

    Raises:
        InputTypeError: ``risk`` or ``confidence_level`` is not a number.
        InputError: ``risk`` or ``confidence_level`` is not in (0, 1), or ``among`` is unknown.

    Source: Angelopoulos et al. (2021), Learn then Test, arXiv 2110.01052 (fixed-sequence testing); Angelopoulos et al.
        (2022), Conformal Risk Control, arXiv 2208.02814.
    """

    threshold: float
    answered: float
    queries: int

    def __init__(
        self, risk: float = 0.05, among: Literal["answered", "all"] = "answered", confidence_level: float = 0.9
    ) -> None:
        self.risk = validate.fraction("risk", risk)
        validate.choice("among", among, ("answered", "all"))
        self.among = among
        self.confidence_level = validate.fraction("confidence_level", confidence_level)

    def fit(
        self,
        score: Tensor | NDArray[np.floating],
        right: Tensor | NDArray[np.bool_],
        groups: Tensor | NDArray[np.integer] | None = None,
    ) -> Self:
        """Find the threshold from labelled queries that neither trained the encoder nor fitted the score.

        Args:
            score: Scores of N queries, finite, shape (N,). Higher means less trust, as with ``uncertainty``.
            right: Whether each query's answer is right, bool (or integers 0 and 1), shape (N,).
            groups: Group of each query, such as its person, numbers, shape (N,). Queries of a group depend on each
                other, and a repeated query is a group, so one of each group, drawn at random, is used.

        Returns:
            The object itself.

        Raises:
            InputTypeError: An argument has a wrong type.
            InputError: Shapes disagree, a score is NaN, answers with higher scores are right more often, or no
                threshold keeps the risk; the message then says how many queries are needed.
        """
        scores = numbers("score", score)
        so = truths("right", right, len(scores))
        if groups is not None:
            rows = one_of_each(numbers("groups", groups, len(scores)).tolist())
            scores, so = scores[rows], so[rows]
        n = len(scores)
        if n < (least := self.least()):
            wanted = f"at least {least:,} queries for a risk of {percent(self.risk)}"
            raise InputError("score", wanted, f"{n:,}", "Take more, or a larger risk.")
        refuse_reversed("score", scores[so], scores[~so], "higher for wrong answers")
        order = np.argsort(scores)
        ascending, wrong = scores[order], np.cumsum(~so[order], dtype=np.int64)
        # Queries with equal scores are answered together.
        ends = np.flatnonzero(np.append(np.diff(ascending) > 0, True))
        starts, tail = self._starts(n)
        accepted = 0
        for start in starts:  # ascending: a later sequence accepts more
            tested = ends[ends + 1 >= start]
            passed = self._keeps_risk(wrong[tested], tested + 1, n, tail)
            if passed[0]:
                accepted = int(tested[np.argmin(np.append(passed, False)) - 1]) + 1
        if not accepted:
            first = ends[ends + 1 >= starts[0]][0]
            raise self._nothing(int(wrong[first]), int(first) + 1, n, tail)
        self.threshold, self.answered, self.queries = float(ascending[accepted - 1]), accepted / n, n
        return self

    def accept(self, score: Array) -> Array:
        """Return which queries are answered.

        Args:
            score: Scores of any number of queries, of the same kind as in the fit.

        Returns:
            Whether each score is at most the threshold: a bool tensor for a tensor, an array for an array.

        Raises:
            NotFittedError: Before :meth:`fit`.
            InputTypeError: ``score`` is neither a tensor nor an array of numbers.
            InputError: The shape is not (N,), or a score is NaN or infinite.
        """
        return like(score, numbers("score", score) <= self.threshold)

    def __repr__(self) -> str:
        if "threshold" not in vars(self):
            return f"RetrievalThreshold(risk={self.risk:g}, among={self.among!r}), not fitted"
        stated = f"at most {percent(self.risk)} of those are wrong, with {percent(self.confidence_level)} confidence"
        if self.among == "all":
            stated = f"wrong answers are at most {percent(self.risk)} of all queries, on average"
        return f"accepts {percent(self.answered)} of queries; {stated}, from {self.queries:,} labelled queries"

    def _keeps_risk(
        self, wrong: NDArray[np.int64] | int, accepted: NDArray[np.int64] | int, n: int, tail: float
    ) -> NDArray[np.bool_]:
        """Return whether ``wrong`` answers among ``accepted`` queries, of n in all, keep the risk."""
        from scipy.special import bdtr

        if self.among == "all":
            return (np.asarray(wrong) + 1) / (n + 1) <= self.risk
        return np.asarray(bdtr(wrong, accepted, self.risk) <= tail)

    def least(self) -> int:
        """Return how many queries allow any threshold, if no answer is wrong."""
        if self.among == "all":
            return math.ceil(1 / self.risk - 1 - 1e-9)
        return math.ceil(math.log(1 - self.confidence_level) / math.log(1 - self.risk) - 1e-9)

    def _starts(self, n: int) -> tuple[list[int], float]:
        """Return how many queries the first test of each sequence accepts, and the error of each sequence."""
        tail = 1 - self.confidence_level
        if self.among == "all":
            return [1], tail
        first = self.first(n)
        if n < _TWO_STARTS * first:
            return [first], tail
        return [self.first(n, tail / 2), n // 2], tail / 2

    def first(self, n: int, tail: float | None = None) -> int:
        """Return the smallest number of queries among which one answer may be wrong, or n."""
        tail = 1 - self.confidence_level if tail is None else tail
        first = self.least()
        while first < n and not self._keeps_risk(1, first, n, tail):
            first += 1
        return first

    def _nothing(self, wrong: int, accepted: int, n: int, tail: float) -> InputError:
        """Return the error for scores without a threshold that keeps the risk."""
        share, more = wrong / accepted, accepted
        got = f"{wrong} wrong answers among the surest {accepted:,} of {n:,}"
        hint = "See whether their labels are right; if they are, take a larger risk or a better score."
        if self.among == "answered" and share < self.risk:
            while not self._keeps_risk(math.ceil(share * more), more, n, tail):
                more += accepted
            hint = f"At this rate it takes about {math.ceil(n * more / accepted):,} queries, or a larger risk."
        return InputError("score", f"surest queries of which at most {percent(self.risk)} are wrong", got, hint)
