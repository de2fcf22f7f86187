"""Error rates of a score for "two inputs are the same" (ISO/IEC 19795-1)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature.errors import InputError
from contrastive_curvature.metrics._checks import Array, like, numbers, truths


class DetCurve(NamedTuple):
    """Both error rates at every threshold; drawn against each other, the DET curve.

    Attributes:
        threshold: All distinct scores, ascending, shape (K,). Pairs with a higher score count as the same.
        false_match_rate: Share of the pairs of two classes above each threshold (FMR), shape (K,).
        false_non_match_rate: Share of the pairs of one class at or below each threshold (FNMR), shape (K,).
    """

    threshold: Any
    false_match_rate: Any
    false_non_match_rate: Any


def det_curve(scores: Array, same: Tensor | NDArray[np.bool_]) -> DetCurve:
    """Return the false match rate and the false non-match rate at every threshold.

    Args:
        scores: Scores of N pairs, higher for more similar pairs, finite, shape (N,); a tensor or an array.
        same: Whether each pair is of one class, bool (or integers 0 and 1), shape (N,), some of both kinds.

    Returns:
        The curve in float64, as tensors or arrays like the scores.

    Source: Martin et al. (1997), The DET curve in assessment of detection task performance; ISO/IEC 19795-1.
    """
    return DetCurve(*(like(scores, values[1:]) for values in _det(scores, same)))


def equal_error_rate(scores: Tensor | NDArray[np.floating], same: Tensor | NDArray[np.bool_]) -> float:
    """Return the error rate at which FMR and FNMR are equal, between two thresholds by linear interpolation.

    Args:
        scores: Scores of N pairs, higher for more similar pairs, finite, shape (N,); a tensor or an array.
        same: Whether each pair is of one class, bool (or integers 0 and 1), shape (N,), some of both kinds.

    Returns:
        A number in [0, 1]; a random score has 0.5.

    Source: ISO/IEC 19795-1.
    """
    _, matched, missed = _det(scores, same)
    # The difference falls from minus infinity (FMR 1, FNMR 0) to the largest score (FMR 0, FNMR 1).
    gap = matched - missed
    after = int(np.argmax(gap <= 0))
    part = gap[after - 1] / (gap[after - 1] - gap[after])
    return float(matched[after - 1] + part * (matched[after] - matched[after - 1]))


def _det(scores: object, same: object) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the curve from minus infinity on, where every pair counts as the same."""
    score = numbers("scores", scores)
    so = truths("same", same, len(score))
    if so.all() or not so.any():
        kind = "one class" if so.all() else "two classes"
        raise InputError("same", "pairs of one class and of two classes", f"pairs of {kind} alone")
    threshold = np.concatenate([[-np.inf], np.unique(score)])
    missed, others = (
        np.searchsorted(np.sort(part), threshold, side="right") / len(part) for part in (score[so], score[~so])
    )
    return threshold, 1 - others, missed
