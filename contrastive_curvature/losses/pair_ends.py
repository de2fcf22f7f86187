"""Listed pairs seen from their points, for losses whose second derivatives couple any two pairs.

With a matrix ``C`` (P, P) of second derivatives in the cosines of P pairs, the block between the points i and j is

``P_i [ sum_{k at i, l at j} C_kl o_ik o_jl^T ] P_j / (n_i n_j)``

where ``o_ik`` is the other point of pair k, seen from i. Every pair has two ends, so sums over the pairs at a point are
sums over ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.hessian.cross import PointVectors
from contrastive_curvature.hessian.moments import Moments
from contrastive_curvature.hessian.sphere import project_tangent
from contrastive_curvature.pairs.relation import BLOCK_ELEMENTS

__all__ = ["ListedMoments", "ListedVectors", "PairEnds"]

_ROWS = 256
"""Ends whose couplings are formed at once."""


@dataclass(frozen=True)
class PairEnds:
    """E ends of pairs, in the order of their points.

    Args:
        points: Number R of points.
        point: Where an end is, shape (E,).
        pair: Which pair it belongs to, shape (E,).
        other: The unit embedding at the other end, shape (E, D).
    """

    points: int
    point: Tensor
    pair: Tensor
    other: Tensor

    @classmethod
    def of(cls, i: Tensor, j: Tensor, u: Tensor) -> PairEnds:
        """Both ends of P pairs.

        Args:
            i: Points, shape (P,).
            j: The others, shape (P,).
            u: Unit embeddings, shape (N, D).
        """
        point, other = torch.cat([i, j]), torch.cat([j, i])
        order = point.argsort(stable=True)
        pair = torch.arange(len(i), device=i.device).repeat(2)
        return cls(len(u), point[order], pair[order], u[other[order]])

    def __getitem__(self, points: slice) -> PairEnds:
        low, high, _ = points.indices(self.points)
        inside = slice(self._before(low), self._before(high))
        return PairEnds(max(0, high - low), self.point[inside] - low, self.pair[inside], self.other[inside])

    def along(self, t: Tensor) -> Tensor:
        """``o_e . t_ek`` for ``t`` of shape (R, D, K), shape (E, K)."""
        found = [(self.other * t[self.point, :, k]).sum(1) for k in range(t.shape[2])]
        return torch.stack(found, dim=1) if found else self.other[:, :0]

    def spread(self, x: Tensor) -> Tensor:
        """``sum_e x_ek o_e`` over the ends at every point, for ``x`` of shape (E, K); shape (R, D, K)."""
        out = x.new_zeros(self.points, self.other.shape[1], x.shape[1])
        for k in range(x.shape[1]):
            out[..., k].index_add_(0, self.point, x[:, k : k + 1] * self.other)
        return out

    def gathered(self, x: Tensor) -> Tensor:
        """Sums over the ends at every point, from (A, E) to (A, R)."""
        return x.new_zeros(len(x), self.points).index_add_(1, self.point, x)

    def coupled(self, c: Tensor, x: Tensor) -> Tensor:
        """``sum_f C_ef x_f`` over the ends f at the same point as e, for ``x`` of shape (E, K)."""
        found = [block @ x[columns] for columns, block in self.couplings(c)]
        return torch.cat(found) if found else torch.zeros_like(x)

    def couplings(self, c: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """``C_ef`` where two ends are at the same point, zero elsewhere, in blocks of ends e: (ends f, numbers)."""
        for start in range(0, len(self.point), _ROWS):
            rows = slice(start, min(start + _ROWS, len(self.point)))
            low, high = int(self.point[rows.start]), int(self.point[rows.stop - 1])
            columns = slice(self._before(low), self._before(high + 1))
            here = self.point[rows].unsqueeze(1) == self.point[columns]
            yield columns, c[self.pair[rows].unsqueeze(1), self.pair[columns]] * here

    def _before(self, point: int) -> int:
        """How many ends are at points in front of this one."""
        return int(torch.searchsorted(self.point, point))


@dataclass(frozen=True)
class ListedMoments(Moments):
    """``M_i = sum_{k, l at i} C_kl o_ik o_il^T``.

    Args:
        ends: At the points.
        c: ``C``, shape (P, P).
    """

    ends: PairEnds
    c: Tensor

    def __getitem__(self, rows: slice) -> ListedMoments:
        return ListedMoments(self.ends[rows], self.c)

    def dense(self) -> Tensor:
        """See :meth:`Moments.dense`."""
        other, dim = self.ends.other, self.ends.other.shape[1]
        mixed = self.ends.coupled(self.c, other)
        out = other.new_zeros(self.ends.points, dim, dim)
        step = max(1, BLOCK_ELEMENTS // dim**2)
        for start in range(0, len(other), step):
            some = slice(start, start + step)
            out.index_add_(0, self.ends.point[some], other[some].unsqueeze(2) * mixed[some].unsqueeze(1))
        return out

    def matmul(self, x: Tensor) -> Tensor:
        """See :meth:`Moments.matmul`."""
        return self.ends.spread(self.ends.coupled(self.c, self.ends.along(x)))

    def diagonal(self, u: Tensor) -> Tensor:
        """See :meth:`Moments.diagonal`."""
        tangent = project_tangent(u[self.ends.point], self.ends.other)
        product = tangent * self.ends.coupled(self.c, tangent)
        return torch.zeros_like(u).index_add_(0, self.ends.point, product)

    def gram(self, u: Tensor, scale: Tensor) -> Tensor:
        """See :meth:`Moments.gram`."""
        tangent = project_tangent(u[self.ends.point], self.ends.other)
        return (tangent * scale[self.ends.point].unsqueeze(1)).T @ self.ends.coupled(self.c, tangent)

    def bound(self) -> Tensor:
        """See :meth:`Moments.bound`."""
        found = [block.abs().sum(1) for _, block in self.ends.couplings(self.c)]
        return self.ends.gathered(torch.cat(found).unsqueeze(0) if found else self.c.new_zeros(1, 0)).squeeze(0)


@dataclass(frozen=True)
class ListedVectors(PointVectors):
    """Vectors over pairs, ``C = sum_a sign_a v_a v_a^T``, as vectors over the outputs of some points.

    Args:
        ends: At the points.
        vectors: ``v``, shape (A, P).
        c: ``C``, shape (P, P).
        weights: See :class:`~contrastive_curvature.hessian.cross.PointVectors`.
    """

    ends: PairEnds
    vectors: Tensor
    c: Tensor
    weights: Tensor

    @classmethod
    def at(cls, ends: PairEnds, vectors: Tensor, c: Tensor) -> ListedVectors:
        """The same without the weights."""
        return cls(ends, vectors, c, ends.gathered(vectors[:, ends.pair].abs()))

    def along(self, t: Tensor) -> Tensor:
        """See :meth:`PointVectors.along`."""
        return self.ends.gathered(self.vectors[:, self.ends.pair] * self.ends.along(t.unsqueeze(2)).T)

    def summed(self, t: Tensor) -> Tensor:
        """See :meth:`PointVectors.summed`."""
        along = self.ends.along(t)
        change = along.new_zeros(self.vectors.shape[1], along.shape[1]).index_add_(0, self.ends.pair, along)
        return self.vectors @ change

    def spread(self, x: Tensor) -> Tensor:
        """See :meth:`PointVectors.spread`."""
        return self.ends.spread((self.vectors.T @ x)[self.ends.pair])

    def blockwise(self, t: Tensor, signs: Tensor, points: Tensor) -> Tensor:
        """See :meth:`PointVectors.blockwise`."""
        del signs  # they are part of C
        return ListedMoments(self.ends, self.c).matmul(t)[points]
