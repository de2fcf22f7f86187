"""Same or not, at a stated false match rate."""

from __future__ import annotations

import math
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.decisions.fitted import Fitted, clopper_pearson, percent, refuse_reversed
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.metrics._arrays import Array, like, numbers, truths


class MatchThreshold(Fitted):
    """Limit of a score above which two inputs count as the same, at a stated false match rate.

    Of new pairs of two classes, drawn as those of the fit were, at most ``false_match_rate`` lie above the threshold,
    on average over the pairs of the fit: the threshold is the k-th largest score of n such pairs, with
    ``k = floor(rate (n + 1))``. The mean is exact for independent pairs; all pairs among few persons have a little
    more. Intervals are those of Clopper and Pearson, at 95 %. With ``groups``, they take the number of independent
    pairs whose rate would vary as much as that of pairs that share persons.

    Args:
        false_match_rate: Largest share of pairs of two classes that may count as the same (FMR), in (0, 1).

    Attributes:
        threshold: Pairs with a higher score count as the same.
        false_non_match_rate: Share of the fit's pairs of one class that do not count as the same (FNMR).
        false_non_match_interval: In which the FNMR of this threshold lies, with 95 % confidence.
        false_match_interval: In which its FMR lies.
        pairs: Numbers of pairs of one class and of two classes in the fit.

    Raises:
        InputTypeError: ``false_match_rate`` is no number.
        InputError: It is not in (0, 1).

    Source: ISO/IEC 19795-1 (the rates); Vovk et al. (2005), Algorithmic Learning in a Random World (the quantile);
        Aronow et al. (2015), Cluster-robust variance estimation for dyadic data, Political Analysis 23 (pairs that
        share persons); Korn and Graubard (1998), Survey Methodology 24 (the interval from the variance).
    """

    threshold: float
    false_non_match_rate: float
    false_non_match_interval: tuple[float, float]
    false_match_interval: tuple[float, float]
    pairs: tuple[int, int]

    def __init__(self, false_match_rate: float = 1e-3) -> None:
        self.false_match_rate = validate.fraction("false_match_rate", false_match_rate)

    def fit(
        self,
        scores: Tensor | NDArray[np.floating],
        same: Tensor | NDArray[np.bool_],
        groups: Tensor | NDArray[np.integer] | None = None,
    ) -> Self:
        """Find the threshold from labelled pairs that neither trained the encoder nor fitted the score.

        Args:
            scores: Of N pairs, finite, shape (N,). Higher means more alike, as a cosine or P(match) is; negate a
                distance.
            same: Whether each pair is of one class, bool (or integers 0 and 1), shape (N,).
            groups: Persons (or other groups) of both ends of each pair, integers, shape (N, 2). Pairs that share a
                person depend on each other; with them, the intervals count that.

        Returns:
            The object itself.

        Raises:
            InputTypeError: An argument has a wrong type.
            InputError: Shapes disagree, a score is NaN, there is no pair of one class, there are fewer than
                ``1 / false_match_rate - 1`` pairs of two classes, or pairs of one class have lower scores.
        """
        score = numbers("scores", scores)
        so = truths("same", same, len(score))
        persons = None if groups is None else _persons(groups, len(score))
        genuine, impostor = score[so], score[~so]
        rate, n = self.false_match_rate, len(impostor)
        if not len(genuine):
            raise InputError(expected("same", "pairs of one class too, for the false non-match rate", "none"))
        # What rounding takes from a whole number is given back.
        k = math.floor(rate * (n + 1) + 1e-9)
        if not k:
            wanted = (
                f"at least {math.ceil(1 / rate - 1 - 1e-9):,} pairs of two classes for a false match rate of {rate:g}"
            )
            raise InputError(expected("same", wanted, f"{n:,}", "Take more pairs, or a larger rate."))
        refuse_reversed("scores", impostor, genuine, "higher for pairs of one class")
        self.threshold = float(np.partition(impostor, n - k)[n - k])
        missed, matched = score <= self.threshold, score > self.threshold
        self.false_non_match_rate = float(missed[so].mean())
        self.false_non_match_interval = _interval(missed[so], None if persons is None else persons[so])
        self.false_match_interval = _interval(matched[~so], None if persons is None else persons[~so])
        self.pairs = len(genuine), n
        return self

    def same(self, scores: Array) -> Array:
        """Return which pairs count as the same.

        Args:
            scores: Of any number of pairs, as in the fit.

        Returns:
            Whether each score is above the threshold: a bool tensor for a tensor, an array for an array.

        Raises:
            NotFittedError: Before :meth:`fit`.
            InputTypeError: ``scores`` is neither a tensor nor an array of numbers.
            InputError: Its shape is not (N,), or a score is NaN or infinite.
        """
        return like(scores, numbers("scores", scores) > self.threshold)

    def __repr__(self) -> str:
        if "pairs" not in vars(self):
            return f"MatchThreshold(false_match_rate={self.false_match_rate:g}), not fitted"
        low, high = map(percent, self.false_non_match_interval)
        rates = f"at most {percent(self.false_match_rate)} of pairs of two classes count as the same, on average; "
        missed = f"{percent(self.false_non_match_rate)} ({low} to {high}) of pairs of one class are missed, "
        genuine, impostor = self.pairs
        return f"same above {self.threshold:.4g}: {rates}{missed}from {genuine:,} and {impostor:,} labelled pairs"


def _persons(groups: object, length: int) -> NDArray[np.int64]:
    """Return the persons of both ends of pairs as numbers from 0, shape (N, 2)."""
    read = groups.detach().cpu().numpy() if isinstance(groups, Tensor) else groups
    if not isinstance(read, np.ndarray) or read.dtype.kind not in "iu":
        hint = "numpy.unique(names, return_inverse=True)[1] numbers names."
        raise InputTypeError(expected("groups", "integers", f"a {type(groups).__name__}", hint))
    if read.shape != (length, 2):
        raise InputError(expected("groups", f"shape ({length}, 2), the persons of both ends", f"shape {read.shape}"))
    return np.unique(read, return_inverse=True)[1].reshape(length, 2)


def _interval(errors: NDArray[np.bool_], persons: NDArray[np.int64] | None) -> tuple[float, float]:
    """Return the 95 % interval of the share of errors among pairs.

    The variance over pairs that share persons sums the products of the residuals of every two such pairs: all products
    of each person's residuals, less those of a pair of two persons with itself, which two persons have counted.
    """
    n = len(errors)
    count = int(errors.sum())
    if persons is None:
        return clopper_pearson(count, n)
    residual = errors - count / n
    left, right = persons.T
    two = left != right
    of_person = (
        np.bincount(left, residual)
        if not two.any()
        else np.bincount(np.concatenate([left, right[two]]), np.concatenate([residual, residual[two]]))
    )
    variance = float((of_person**2).sum() - (residual[two] ** 2).sum()) / n**2
    # Without an error there is no variance to see, and each person counts as one pair.
    independent = count / n * (1 - count / n) / variance if variance > 0 else len(np.unique(persons))
    independent = min(n, independent)
    return clopper_pearson(count / n * independent, independent)
