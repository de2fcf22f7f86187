"""Same or not, at a stated false match rate."""

from __future__ import annotations

import math
import warnings
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.decisions.fitted import FittedAttributes, clopper_pearson, percent, refuse_reversed
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.metrics._checks import Array, like, numbers, truths


class MatchThreshold(FittedAttributes):
    """Threshold of a score above which two inputs count as the same, at a stated false match rate.

    At most a share ``false_match_rate`` of new pairs of two classes, drawn like the pairs of the fit, scores above the
    threshold, on average over the pairs of the fit. The threshold is the k-th largest score of n such pairs, with
    ``k = floor(rate (n + 1))``. The bound is exact for independent pairs. Pairs that share persons exceed it, unless
    ``groups`` names the persons: each pair of two classes is then compared with the pairs that share neither of its
    persons, and k is the largest number for which at most the stated share of pairs matches. Intervals are 95 %
    intervals of Clopper and Pearson. With ``groups``, the interval of the FMR counts these matches, and both intervals
    use an effective number of independent pairs: their rate would vary as much as the rate of pairs that share persons.
    Few persons lower this number further, because then the variance itself is uncertain.

    Args:
        false_match_rate: Largest share of pairs of two classes that may count as the same (FMR), in (0, 1).

    Attributes:
        threshold: The threshold; pairs with a higher score count as the same.
        false_non_match_rate: Share of the fit's pairs of one class that do not count as the same (FNMR).
        false_non_match_interval: 95 % confidence interval of the FNMR at this threshold.
        false_match_interval: 95 % confidence interval of the FMR at this threshold.
        pairs: Numbers of pairs of one class and of two classes in the fit.

    Raises:
        InputTypeError: ``false_match_rate`` is not a number.
        InputError: ``false_match_rate`` is not in (0, 1).

    Source: ISO/IEC 19795-1 (the rates); Vovk et al. (2005), Algorithmic Learning in a Random World (the quantile);
        Vovk (2015), Cross-conformal predictors, Annals of Mathematics and Artificial Intelligence 74 (pairs judged
        by others); Aronow et al. (2015), Cluster-robust variance estimation for dyadic data, Political Analysis 23
        (pairs that share persons); Korn and Graubard (1998), Survey Methodology 24 (the interval from the variance);
        Satterthwaite (1946), Biometrics Bulletin 2 (its degrees of freedom).
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
            scores: Scores of N pairs, finite, shape (N,). Higher means more alike, like a cosine or P(match); negate a
                distance.
            same: Whether each pair is of one class, bool (or integers 0 and 1), shape (N,).
            groups: Persons (or other groups) of both ends of each pair, integers, shape (N, 2). Pairs that share a
                person depend on each other; with ``groups``, the threshold and the intervals account for this.

        Returns:
            The object itself.

        Warns:
            UserWarning: ``groups`` has so few pairs of persons that the rate and the intervals may not hold.

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
            raise InputError("same", "pairs of one class too, for the false non-match rate", "none")
        # The small number undoes the rounding of a whole number.
        k = math.floor(rate * (n + 1) + 1e-9)
        if not k:
            wanted = (
                f"at least {math.ceil(1 / rate - 1 - 1e-9):,} pairs of two classes for a false match rate of {rate:g}"
            )
            raise InputError("same", wanted, f"{n:,}", "Take more pairs, or a larger rate.")
        refuse_reversed("scores", impostor, genuine, "higher for pairs of one class")
        apart = None
        if persons is not None:
            apart, people = _apart(impostor, persons[~so])
            few = math.ceil(2 / rate - 1e-9)
            if people < few:
                msg = (
                    f"groups: {people:,} pairs of persons are few for a false match rate of {rate:g}, which may be "
                    f"exceeded; the intervals may be too narrow. Take at least {few:,} (all pairs among "
                    f"{math.ceil(0.5 + math.sqrt(0.25 + 2 * few)):,} persons), or a larger rate."
                )
                warnings.warn(msg, UserWarning, stacklevel=2)
            allowed = apart[apart < np.sort(apart)[min(k, n - 1)]].max(initial=apart.min())
            level = min(k / (n + 1), allowed)
            k = math.floor(level * (n + 1) + 1e-9)
        self.threshold = float(np.partition(impostor, n - k)[n - k])
        missed = score[so] <= self.threshold
        matched = impostor > self.threshold if apart is None else apart <= level
        self.false_non_match_rate = float(missed.mean())
        self.false_non_match_interval = _interval(missed, None if persons is None else persons[so])
        self.false_match_interval = _interval(matched, None if persons is None else persons[~so])
        self.pairs = len(genuine), n
        return self

    def same(self, scores: Array) -> Array:
        """Return which pairs count as the same.

        Args:
            scores: Scores of any number of pairs, of the same kind as in the fit.

        Returns:
            Whether each score is above the threshold: a bool tensor for a tensor, an array for an array.

        Raises:
            NotFittedError: Before :meth:`fit`.
            InputTypeError: ``scores`` is neither a tensor nor an array of numbers.
            InputError: The shape is not (N,), or a score is NaN or infinite.
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
    validate.unmasked("groups", groups)
    read = groups.detach().cpu().numpy() if isinstance(groups, Tensor) else groups
    if not isinstance(read, np.ndarray) or read.dtype.kind not in "iu":
        hint = "numpy.unique(names, return_inverse=True)[1] numbers names."
        raise InputTypeError("groups", "integers", f"a {type(groups).__name__}", hint)
    if read.shape != (length, 2):
        raise InputError("groups", f"shape ({length}, 2), the persons of both ends", f"shape {read.shape}")
    return np.unique(read, return_inverse=True)[1].reshape(length, 2)


def _apart(scores: NDArray[np.float64], persons: NDArray[np.int64]) -> tuple[NDArray[np.float64], int]:
    """Return p-values of pairs among the pairs that share none of their persons, and the number of pairs of persons."""
    left, right = np.sort(persons, axis=1).T
    two = left != right
    rank = np.unique(-scores, return_inverse=True)[1]
    ranks = rank.max() + 1
    pair = np.unique(left * (right.max() + 1) + right, return_inverse=True)[1]
    of_all, of_pair = np.sort(rank), np.sort(pair * ranks + rank)
    of_person = np.sort(np.concatenate([left * ranks + rank, (right * ranks + rank)[two]]))

    def count(keyed: NDArray[np.int64], key: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count the pairs of each key: pairs with at least this score, and all pairs."""
        first, last, end = np.searchsorted(keyed, [key * ranks, key * ranks + rank + 1, (key + 1) * ranks])
        return np.stack([last - first, end - first])

    sharing = count(of_person, left) + two * (count(of_person, right) - count(of_pair, pair))
    higher, others = count(of_all, np.zeros_like(left)) - sharing
    return (higher + 1) / (others + 1), int(pair.max()) + 1


def _interval(errors: NDArray[np.bool_], persons: NDArray[np.int64] | None) -> tuple[float, float]:
    """Return the 95 % interval of the share of errors among pairs.

    The variance sums the products of residuals over every two pairs that share a person: for each person, all products
    of its residuals. A pair of two persons then counts its own square twice, so one is subtracted. The residuals of a
    person are divided by the number of pairs without the person, as in the jackknife. The excess over the variance of
    independent pairs is uncertain, so it is multiplied by the squared ratio of Student's quantile to the normal
    quantile. The degrees of freedom follow from the unequal parts of the persons.
    """
    n = len(errors)
    share = int(errors.sum()) / n
    if persons is None:
        return clopper_pearson(share * n, n)
    left, right = persons.T
    two = left != right
    residual, ends = errors - share, np.concatenate([left, right[two]])
    counts = np.bincount(ends)
    people = int(np.count_nonzero(counts))
    # Without errors the variance cannot be estimated, so each person counts as one pair.
    if people == 1 or share in (0, 1):
        return clopper_pearson(share * people, people)
    from scipy.special import ndtri, stdtrit

    of_person = np.bincount(ends, np.concatenate([residual, residual[two]]))
    squares = (of_person / np.maximum(n - counts, 1)) ** 2
    uneven = (squares**2).sum() - squares.sum() ** 2 / people
    freedom = min(people - 1, 2 * squares.sum() ** 2 / uneven) if uneven > 0 else people - 1
    alone = share * (1 - share) / n
    more = squares.sum() - (residual[two] ** 2).sum() / n**2 - alone
    independent = share * (1 - share) / (alone + max(0, more) * (stdtrit(freedom, 0.975) / ndtri(0.975)) ** 2)
    return clopper_pearson(share * independent, independent)
