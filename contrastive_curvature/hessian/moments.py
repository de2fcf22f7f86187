"""The second-order part of the diagonal blocks, from weights of pairs: no matrix of a point is formed unless asked for.

A loss with second derivatives adds ``P_i M_i P_i / n_i^2`` to the block of point i, with the tangent projector ``P_i``
and the weighted moment of its candidates

``M_i = sum_j w_ij o_j o_j^T + sum_r sign_r v_ri v_ri^T``

A loss of single pairs has weights ``w_ij = d2L/ds_ij^2`` only; the vectors ``v`` come from losses that compare all
candidates of an anchor, whose second derivatives are a diagonal and few squares (``losses/rows.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.hessian.sphere import project_tangent
from contrastive_curvature.pairs.relation import BLOCK_ELEMENTS


class Moments(ABC):
    """N symmetric (D, D) matrices ``M_i``."""

    @abstractmethod
    def __getitem__(self, rows: slice) -> Moments:
        """Return those of some of the points, a slice of step one."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return them as matrices, shape (N, D, D)."""

    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        """Return ``M_i x_ik`` for ``x`` of shape (N, D, K)."""

    @abstractmethod
    def diagonal(self, u: Tensor) -> Tensor:
        """Return ``diag(P_i M_i P_i)`` for unit embeddings ``u`` of the N points, shape (N, D)."""

    @abstractmethod
    def gram(self, u: Tensor, scale: Tensor) -> Tensor:
        """Return ``sum_i scale_i P_i M_i P_i`` for unit embeddings (N, D) and numbers (N,), shape (D, D)."""

    @abstractmethod
    def bound(self) -> Tensor:
        """Return a bound of the entries of ``M_i`` in absolute value, shape (N,); not finite where an entry is not."""


@dataclass(frozen=True)
class DenseMoments(Moments):
    """Moments held as matrices.

    Args:
        matrices: Shape (N, D, D).
    """

    matrices: Tensor

    def __getitem__(self, rows: slice) -> DenseMoments:
        return DenseMoments(self.matrices[rows])

    def dense(self) -> Tensor:
        """See :meth:`Moments.dense`."""
        return self.matrices

    def matmul(self, x: Tensor) -> Tensor:
        """See :meth:`Moments.matmul`."""
        return self.matrices @ x

    def diagonal(self, u: Tensor) -> Tensor:
        """See :meth:`Moments.diagonal`."""
        return _projected(u, self.matrices).diagonal(dim1=1, dim2=2)

    def gram(self, u: Tensor, scale: Tensor) -> Tensor:
        """See :meth:`Moments.gram`."""
        return torch.einsum("i,iab->ab", scale, _projected(u, self.matrices))

    def bound(self) -> Tensor:
        """See :meth:`Moments.bound`."""
        return self.matrices.abs().flatten(1).sum(1)


@dataclass(frozen=True)
class MomentPart:
    """Weights of a range of points and the candidates that they belong to.

    Args:
        start: First point.
        stop: One past the last point.
        weigh: Weights of the points from one to another, (B, M), numbered like ``start``; where they are known already
            together with their cosines with the candidates, (B, M).
        others: ``o``, shape (M, D).
    """

    start: int
    stop: int
    weigh: Callable[[int, int], Tensor | tuple[Tensor, Tensor | None]]
    others: Tensor


class PairMoments(Moments):
    """Moments from weights of pairs, which are asked for in blocks of points.

    Args:
        parts: Ranges of points, in order, without a gap.
        signs: Of the vectors, shape (R,).
        vectors: ``v``, shape (R, N, D).
        bound: See :meth:`Moments.bound`, where it is known.
    """

    def __init__(self, parts: list[MomentPart], signs: Tensor, vectors: Tensor, bound: Tensor | None = None) -> None:
        self.parts, self.signs, self.vectors, self._bound = parts, signs, vectors, bound
        self._last: tuple[tuple[int, int], tuple[Tensor, Tensor | None]] | None = None

    def __getitem__(self, rows: slice) -> PairMoments:
        first = self.parts[0].start if self.parts else 0
        low, high, _ = rows.indices(self.vectors.shape[1])
        parts = [
            MomentPart(max(p.start, first + low), min(p.stop, first + high), p.weigh, p.others) for p in self.parts
        ]
        kept = [p for p in parts if p.start < p.stop]
        bound = None if self._bound is None else self._bound[rows]
        return PairMoments(kept, self.signs, self.vectors[:, rows], bound)

    def release(self) -> None:
        """Forget the last weights."""
        self._last = None

    def dense(self) -> Tensor:
        """See :meth:`Moments.dense`."""
        _, n, dim = self.vectors.shape
        out = self.vectors.new_zeros(n, dim * dim)
        for rows, weights, _, others in self._blocks():
            step = max(1, BLOCK_ELEMENTS // dim**2)
            for start in range(0, others.shape[0], step):
                some = others[start : start + step]
                outer = (some.unsqueeze(2) * some.unsqueeze(1)).flatten(1)
                out[rows].addmm_(weights[:, start : start + step], outer)
        out = out.view(n, dim, dim)
        for sign, v in zip(self.signs, self.vectors, strict=True):
            out += sign * v.unsqueeze(2) * v.unsqueeze(1)
        return out

    def matmul(self, x: Tensor) -> Tensor:
        """See :meth:`Moments.matmul`."""
        _, n, dim = self.vectors.shape
        if x.shape[2] > dim:
            # More columns than a matrix has: forming it is cheaper.
            step = max(1, BLOCK_ELEMENTS // max(1, dim * dim))
            parts = [self[k : k + step].dense() @ x[k : k + step] for k in range(0, n, step)]
            return torch.cat(parts) if parts else torch.zeros_like(x)
        out = torch.zeros_like(x)
        for rows, weights, _, others in self._blocks():
            for k in range(x.shape[2]):
                out[rows, :, k] = (weights * (x[rows, :, k] @ others.T)) @ others
        for sign, v in zip(self.signs, self.vectors, strict=True):
            out += sign * v.unsqueeze(2) * (v.unsqueeze(1) @ x)
        return out

    def diagonal(self, u: Tensor) -> Tensor:
        """See :meth:`Moments.diagonal`."""
        out = torch.zeros_like(u)
        for rows, weights, known, others in self._blocks():
            x = u[rows]
            cosine = x @ others.T if known is None else known
            along = weights * cosine
            mixed = 2 * (along @ others) - x * torch.linalg.vecdot(along, cosine).unsqueeze(1)
            out[rows] = torch.addmm(-x * mixed, weights, others.square())
        for sign, v in zip(self.signs, self.vectors, strict=True):
            out += sign * project_tangent(u, v).square()
        return out

    def gram(self, u: Tensor, scale: Tensor) -> Tensor:
        """See :meth:`Moments.gram`."""
        out = u.new_zeros(u.shape[1], u.shape[1])
        for rows, weights, known, others in self._blocks():
            x = u[rows]
            cosine = x @ others.T if known is None else known
            along = weights * cosine
            half = torch.linalg.vecdot(along, cosine).unsqueeze(1) * x / 2 - along @ others
            mixed = (x * scale[rows].unsqueeze(1)).T @ half
            out += mixed + mixed.T + (others * (scale[rows] @ weights).unsqueeze(1)).T @ others
        for sign, v in zip(self.signs, self.vectors, strict=True):
            tangent = project_tangent(u, v)
            out.addmm_((tangent * (sign * scale).unsqueeze(1)).T, tangent)
        return out

    def bound(self) -> Tensor:
        """See :meth:`Moments.bound`."""
        if self._bound is not None:
            return self._bound
        out = self.vectors.square().sum((0, 2))
        for rows, weights, *_ in self._blocks():
            out[rows] += torch.linalg.vector_norm(weights, ord=1, dim=1)
        self._bound = out
        return out

    def _blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None, Tensor]]:
        """Iterate over rows, their weights, known cosines and candidates, in blocks of bounded size."""
        first = self.parts[0].start if self.parts else 0
        for part in self.parts:
            step = max(1, BLOCK_ELEMENTS // max(1, part.others.shape[0]))
            for start in range(part.start, part.stop, step):
                stop = min(start + step, part.stop)
                yield slice(start - first, stop - first), *self._weigh(part, start, stop), part.others

    def _weigh(self, part: MomentPart, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Return the weights of a block; the last ones are kept, as one operation follows another."""
        if self._last is None or self._last[0] != (start, stop):
            found = part.weigh(start, stop)
            self._last = (start, stop), found if isinstance(found, tuple) else (found, None)
        return self._last[1]


def _projected(u: Tensor, matrices: Tensor) -> Tensor:
    return project_tangent(u, project_tangent(u, matrices).mT)
