"""How much a curvature depends on which points stand for all negatives, from two halves of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from contrastive_curvature.hessian.dataset import DatasetHessian
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.pairs.rows import point_keys

_MOST_POINTS = 2**12
"""Points that the error is estimated from. All points share the noise of a sample; fewer make it look larger, not
smaller."""

_SEED = 1
"""Of the choice of these points, which is not that of the sampled negatives."""

_MEAN, _DIFFERENCE = "error/mean", "error/difference"


class StandardError:
    """The diagonal of the curvature of some points, and its difference between two halves of the sample.

    Args:
        pullback: Pullback to the parameters.
        n: Number of points of the data set.
    """

    def __init__(self, pullback: Pullback, n: int) -> None:
        self._pullback = pullback
        share = min(1.0, _MOST_POINTS / max(1, n))
        # Keys are spread over all whole numbers of 64 bits.
        self._bound = None if share >= 1 else int(-(2**63) + share * 2**64)

    def terms(
        self, hessian: DatasetHessian, z: Tensor, targets: Tensor, context: Any, numbers: Tensor
    ) -> dict[str, Tensor]:
        """Return what a batch adds to the sums that :func:`relative_error` takes."""
        stop = len(z)
        if self._bound is not None:
            # The first rows of a batch, as many as the share says: contexts are cut by ranges.
            stop = int((point_keys(numbers, _SEED) < self._bound).sum())
            if not stop:
                return {}
        rows = slice(0, stop)
        found = hessian.estimates_at(z[rows], targets[rows])
        if len(found) < 2:
            return {}
        some = context if stop == len(z) else self._pullback.slice_context(context, rows)
        first, second = (self._pullback.diag(some, blocks) for blocks in found)
        return {_MEAN: first + second, _DIFFERENCE: first - second}


def relative_error(sums: Mapping[str, Tensor], sampled: int, n: int) -> float | None:
    """Return the relative standard error of a curvature's diagonal in the Frobenius norm; ``None`` if unknown.

    Half the difference between two halves of a sample is what the whole sample is off by, times ``sqrt(1 - M / N)``,
    since a sample of all N points is exact.

    Source: the variance of a mean in sampling without replacement (Cochran, Sampling Techniques, 1977, section 2.6).
    """
    if _MEAN not in sums or _DIFFERENCE not in sums:
        return None
    size = float((sums[_MEAN].double() / 2).norm())
    if not size:
        return None
    return float((sums[_DIFFERENCE].double() / 2).norm()) / size * max(0.0, 1 - sampled / n) ** 0.5
