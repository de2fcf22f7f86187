"""How much a curvature depends on which points stand for all negatives, from two halves of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.dataset import DatasetHessian
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import Structure
from contrastive_curvature.parts.rows import point_keys

__all__ = ["StandardError", "relative_error"]

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
        """Return what a batch adds to the sums that :func:`relative_error` takes.

        Args:
            hessian: Of the data set.
            z: Raw outputs, shape (B, D).
            targets: Their targets, shape (B, ...).
            context: Of the pullback.
            numbers: Of the points, shape (B,).
        """
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
        first, second = found
        difference = self._pullback.block_term(some, _Combined(first.u, first, second, -1.0), Structure.DIAG)
        mean = self._pullback.block_term(some, _Combined(first.u, first, second, 1.0), Structure.DIAG)
        return {_MEAN: mean, _DIFFERENCE: difference}


def relative_error(sums: Mapping[str, Tensor], sampled: int, n: int) -> float | None:
    """Relative standard error of a curvature in the Frobenius norm of its diagonal; ``None`` where it is unknown.

    Half the difference between two halves of a sample is what the whole sample is off by, times ``sqrt(1 - M / N)``,
    since a sample of all N points is exact.

    Args:
        sums: Of all parts, see :meth:`StandardError.terms`.
        sampled: Number M of sampled points.
        n: Number N of points.

    Source: the variance of a mean in sampling without replacement (Cochran, Sampling Techniques, 1977, section 2.6).
    """
    if _MEAN not in sums or _DIFFERENCE not in sums:
        return None
    size = float((sums[_MEAN].double() / 2).norm())
    if not size:
        return None
    return float((sums[_DIFFERENCE].double() / 2).norm()) / size * max(0.0, 1 - sampled / n) ** 0.5


@dataclass(frozen=True)
class _Combined(Blocks):
    """``A_i + sign B_i``."""

    u: Tensor
    first: Blocks
    second: Blocks
    sign: float

    def __getitem__(self, rows: slice | Tensor) -> _Combined:
        return _Combined(self.u[rows], self.first[rows], self.second[rows], self.sign)

    def matmul(self, v: Tensor) -> Tensor:
        """See :meth:`Blocks.matmul`."""
        return self.first.matmul(v) + self.sign * self.second.matmul(v)

    def diagonal(self) -> Tensor:
        """See :meth:`Blocks.diagonal`."""
        return self.first.diagonal() + self.sign * self.second.diagonal()
