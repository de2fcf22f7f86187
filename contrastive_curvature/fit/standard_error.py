"""How much a curvature depends on the sample that replaces all negatives, from two halves of the sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from contrastive_curvature.losses.dataset import DatasetHessian
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.pairs.rows import point_keys

_MOST_POINTS = 2**12
"""Points that the error is estimated from. All points share the noise of a sample; fewer make it look larger, not
smaller."""

_SEED = 1
"""Of the choice of these points, which is not that of the sampled negatives."""

_MEAN, _DIFFERENCE = "error/mean", "error/difference"


def error_terms(
    hessian: DatasetHessian, pullback: Pullback, z: Tensor, targets: Tensor, context: Any, numbers: Tensor
) -> dict[str, Tensor]:
    """Return the terms of a batch in the sums for :func:`relative_error`.

    For some points, the curvature diagonal is computed with each half of the sample; the terms are the sum and the
    difference of these two diagonals.
    """
    if len(hessian.halves) < 2:
        return {}
    share, stop = min(1.0, _MOST_POINTS / max(1, len(hessian))), len(z)
    if share < 1:
        # Keys are uniform over all 64-bit integers, so this is a random number of points. It takes the first rows of
        # the batch, because contexts are cut by ranges.
        stop = int((point_keys(numbers, _SEED) < int(-(2**63) + share * 2**64)).sum())
        if not stop:
            return {}
    rows = slice(0, stop)
    some = context if stop == len(z) else pullback.slice_context(context, rows)
    halves = (half.at(z[rows], targets[rows], numbers[rows]).blocks for half in hessian.halves)
    first, second = (pullback.diag(some, blocks) for blocks in halves)
    return {_MEAN: first + second, _DIFFERENCE: first - second}


def relative_error(sums: Mapping[str, Tensor], sampled: int, n: int) -> float | None:
    """Return the relative standard error of a curvature's diagonal in the Frobenius norm; ``None`` if unknown.

    The error of the whole sample is half the difference between its two halves, times ``sqrt(1 - M / N)``, because a
    sample of all N points is exact.

    Source: the variance of a mean in sampling without replacement (Cochran, Sampling Techniques, 1977, section 2.6).
    """
    if _MEAN not in sums or _DIFFERENCE not in sums:
        return None
    size = float((sums[_MEAN].double() / 2).norm())
    if not size:
        return None
    return float((sums[_DIFFERENCE].double() / 2).norm()) / size * max(0.0, 1 - sampled / n) ** 0.5
