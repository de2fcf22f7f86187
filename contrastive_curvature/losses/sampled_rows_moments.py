"""The second-order part of points whose candidates are a bank that all share, and those of their own class."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from contrastive_curvature.hessian.moments import Moments, PairMoments

__all__ = ["SpreadMoments"]


class SpreadMoments(Moments):
    """A sum of moments that belong to some of the points each, in float64; results have the dtype of the points.

    Args:
        parts: Which of the points, in rising order, and their moments.
        n: Number N of points.
        dtype: Of the results.
        bound: See :meth:`Moments.bound`, shape (N,).
    """

    def __init__(self, parts: list[tuple[Tensor, PairMoments]], n: int, dtype: torch.dtype, bound: Tensor) -> None:
        self.parts, self.n, self.dtype, self._bound = parts, n, dtype, bound

    def __getitem__(self, rows: slice) -> SpreadMoments:
        low, high, _ = rows.indices(self.n)
        high = max(low, high)
        parts = []
        for points, moments in self.parts:
            start, stop = (int(torch.searchsorted(points, end)) for end in (low, high))
            if start < stop:
                parts.append((points[start:stop] - low, moments[start:stop]))
        return SpreadMoments(parts, high - low, self.dtype, self._bound[low:high])

    def dense(self) -> Tensor:
        """See :meth:`Moments.dense`."""
        dim = self.parts[0][1].vectors.shape[2] if self.parts else 0
        return self._sum((dim, dim), lambda _, moments: moments.dense())

    def matmul(self, x: Tensor) -> Tensor:
        """See :meth:`Moments.matmul`."""
        wide = x.double()
        return self._sum(x.shape[1:], lambda points, moments: moments.matmul(wide[points]))

    def diagonal(self, u: Tensor) -> Tensor:
        """See :meth:`Moments.diagonal`."""
        wide = u.double()
        return self._sum(u.shape[1:], lambda points, moments: moments.diagonal(wide[points]))

    def gram(self, u: Tensor, scale: Tensor) -> Tensor:
        """See :meth:`Moments.gram`."""
        wide, weight = u.double(), scale.double()
        out = wide.new_zeros(u.shape[1], u.shape[1])
        for points, moments in self.parts:
            out += moments.gram(wide[points], weight[points])
        return out.to(self.dtype)

    def bound(self) -> Tensor:
        """See :meth:`Moments.bound`."""
        return self._bound.to(self.dtype)

    def _sum(self, shape: tuple[int, ...], of: Callable[[Tensor, PairMoments], Tensor]) -> Tensor:
        out = self._bound.new_zeros(self.n, *shape)
        for points, moments in self.parts:
            out.index_add_(0, points, of(points, moments))
        return out.to(self.dtype)
