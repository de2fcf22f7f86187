"""The second-order part of the diagonal blocks, from weights of pairs; matrices of points only on request.

A loss with second derivatives adds ``P_i M_i P_i / n_i^2`` to the block of point i, with the tangent projector ``P_i``
and the weighted moment of its candidates

``M_i = sum_j w_ij o_j o_j^T + sum_r sign_r v_ri v_ri^T``

A loss of single pairs has weights ``w_ij = d2L/ds_ij^2`` only; the vectors ``v`` come from losses that compare all
candidates of an anchor: the second derivatives of such a loss are a diagonal and squares (``losses/row_loss.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature import waiting
from contrastive_curvature.hessian.blocks import Blocks, DenseBlocks, UnrepresentableError, holds_curvature
from contrastive_curvature.hessian.sphere import project_tangent
from contrastive_curvature.pairs.relation import row_ranges


@dataclass
class MomentPart:
    """Weights of a block of points and their shared candidates.

    Args:
        points: Numbers of the points, ascending, shape (P,); on the CPU nothing waits to cut them.
        weigh: Function of a first and a last number that returns the weights of these points, (B, M), and their cosines
            with the candidates, (B, M), if known.
        others: ``o``, shape (M, D).
        first: Number of the first point for ``weigh``.
        last: Range and weights of the last block, kept for the next operation.
    """

    points: Tensor
    weigh: Callable[[int, int], tuple[Tensor, Tensor | None]]
    others: Tensor
    first: int = 0
    last: tuple[tuple[int, int], tuple[Tensor, Tensor | None]] | None = None

    def between(self, low: int, high: int) -> MomentPart:
        """Return the part of points ``low..high``, numbered from ``low``."""
        start, stop = (int(torch.searchsorted(self.points, end)) for end in (low, high))
        return MomentPart(self.points[start:stop] - low, self.weigh, self.others, self.first + start)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
        """Iterate over points, their weights, cosines (if known) and candidates, in blocks of bounded size."""
        for some in row_ranges(len(self.points), len(self.others)):
            numbers = self.first + some.start, self.first + some.stop
            if self.last is None or self.last[0] != numbers:
                self.last = numbers, self.weigh(*numbers)
            yield waiting.sent(self.points[some], self.others.device), *self.last[1], self.others


class Moments:
    """N symmetric (D, D) matrices ``M_i`` from weights of pairs, which are computed in blocks of points.

    The moments are computed in the dtype of the vectors.

    Args:
        parts: Points with the same candidates; a point may be in several parts.
        signs: Signs of the vectors, shape (R,).
        vectors: ``v``, shape (R, N, D).
        bound: See :meth:`bound`, shape (N,).
        dtype: Dtype of the results; by default the dtype of the vectors.
    """

    def __init__(
        self,
        parts: list[MomentPart],
        signs: Tensor,
        vectors: Tensor,
        bound: Tensor,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.parts, self.signs, self.vectors, self._bound = parts, signs, vectors, bound
        self.dtype = dtype or vectors.dtype

    def __getitem__(self, rows: slice) -> Moments:
        """Return the moments of a slice of the points, with step one."""
        low, high, _ = rows.indices(self.vectors.shape[1])
        parts = [part.between(low, max(low, high)) for part in self.parts]
        return Moments(parts, self.signs, self.vectors[:, rows], self._bound[rows], self.dtype)

    def dense(self) -> Tensor:
        """Return the moments as matrices, shape (N, D, D)."""
        _, n, dim = self.vectors.shape
        out = self.vectors.new_zeros(n, dim * dim)
        for points, weights, _, others in self._blocks():
            for some in row_ranges(len(others), dim**2):
                outer = (others[some].unsqueeze(2) * others[some].unsqueeze(1)).flatten(1)
                out.index_add_(0, points, weights[:, some] @ outer)
        out = out.view(n, dim, dim)
        for sign, v in zip(self.signs, self.vectors, strict=True):
            out += sign * v.unsqueeze(2) * v.unsqueeze(1)
        return out.to(self.dtype)

    def matmul(self, x: Tensor) -> Tensor:
        """Return ``M_i x_ik`` for ``x`` of shape (N, D, K)."""
        _, n, dim = self.vectors.shape
        if x.shape[2] > dim:
            # With more columns than a matrix has, forming the matrix is cheaper.
            parts = [self[rows].dense() @ x[rows] for rows in row_ranges(n, dim * dim)]
            return torch.cat(parts) if parts else torch.zeros_like(x)
        x = x.to(self.vectors.dtype)
        out = torch.zeros_like(x)
        for points, weights, _, others in self._blocks():
            for k in range(x.shape[2]):
                out[..., k].index_add_(0, points, (weights * (x[points, :, k] @ others.T)) @ others)
        for sign, v in zip(self.signs, self.vectors, strict=True):
            out += sign * v.unsqueeze(2) * (v.unsqueeze(1) @ x)
        return out.to(self.dtype)

    def diagonal(self, u: Tensor) -> Tensor:
        """Return ``diag(P_i M_i P_i)`` for unit embeddings ``u`` of the N points, shape (N, D)."""
        u = u.to(self.vectors.dtype)
        out = torch.zeros_like(u)
        for points, weights, known, others in self._blocks():
            x = u[points]
            cosine = x @ others.T if known is None else known
            along = weights * cosine
            mixed = 2 * (along @ others) - x * torch.linalg.vecdot(along, cosine).unsqueeze(1)
            out.index_add_(0, points, torch.addmm(-x * mixed, weights, others.square()))
        for sign, v in zip(self.signs, self.vectors, strict=True):
            out += sign * project_tangent(u, v).square()
        return out.to(self.dtype)

    def gram(self, u: Tensor, scale: Tensor) -> Tensor:
        """Return ``sum_i scale_i P_i M_i P_i`` for unit embeddings (N, D) and numbers (N,), shape (D, D)."""
        u, scale = u.to(self.vectors.dtype), scale.to(self.vectors.dtype)
        out = u.new_zeros(u.shape[1], u.shape[1])
        for points, weights, known, others in self._blocks():
            x = u[points]
            cosine = x @ others.T if known is None else known
            along = weights * cosine
            half = torch.linalg.vecdot(along, cosine).unsqueeze(1) * x / 2 - along @ others
            mixed = (x * scale[points].unsqueeze(1)).T @ half
            out += mixed + mixed.T + (others * (scale[points] @ weights).unsqueeze(1)).T @ others
        for sign, v in zip(self.signs, self.vectors, strict=True):
            tangent = project_tangent(u, v)
            out.addmm_((tangent * (sign * scale).unsqueeze(1)).T, tangent)
        return out.to(self.dtype)

    def bound(self) -> Tensor:
        """Bound the absolute entries of ``M_i``, shape (N,); not finite for an entry that is not finite."""
        return self._bound.to(self.dtype)

    def _blocks(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
        """Iterate over the blocks of all parts."""
        return chain.from_iterable(part.blocks() for part in self.parts)


_DENSE_ELEMENTS = 2**24
"""Numbers of matrices that are formed at once."""


@dataclass(frozen=True)
class CurvedBlocks(Blocks):
    """``H_ii = F_i + P_i M_i P_i / n_i^2``.

    Args:
        first: Blocks ``F_i`` of the first-order part.
        n: Norms of the raw outputs, shape (N,).
        moments: ``M_i``, see :mod:`contrastive_curvature.hessian.moments`.
    """

    first: Blocks
    n: Tensor
    moments: Moments

    def __post_init__(self) -> None:
        held = (self.moments.bound() / self.n / self.n).isfinite() & holds_curvature(self.n)
        waiting.require(held.all(), partial(UnrepresentableError.at, self.n, held))

    @property
    def u(self) -> Tensor:  # type: ignore[override]
        """Return the unit embeddings, shape (N, D)."""
        return self.first.u

    def __getitem__(self, rows: slice) -> CurvedBlocks:
        return CurvedBlocks(self.first[rows], self.n[rows], self.moments[rows])

    @override
    def matmul(self, v: Tensor) -> Tensor:
        columns = v.unsqueeze(2) if v.ndim == 2 else v
        scale = (1 / self.n / self.n).view(-1, 1, 1)
        second = project_tangent(self.u, self.moments.matmul(project_tangent(self.u, columns)))
        return self.first.matmul(v) + (scale * second).view_as(v)

    @override
    def diagonal(self) -> Tensor:
        return self.first.diagonal() + self.moments.diagonal(self.u) / (self.n * self.n).unsqueeze(1)

    @override
    def dense(self) -> Tensor:
        u, moments = self.u, self.moments.dense()
        second = project_tangent(u, project_tangent(u, moments).mT) / (self.n * self.n).view(-1, 1, 1)
        return self.first.dense() + (second + second.mT) / 2

    @override
    def terms(self) -> Tensor:
        return self.moments.bound() / self.n / self.n

    @override
    def total(self) -> Tensor:
        return self.first.total() + self.moments.gram(self.u, 1 / self.n / self.n)

    @override
    def add_projector(self, weight: Tensor) -> CurvedBlocks:
        return replace(self, first=self.first.add_projector(weight))

    @override
    def eigenvalue_bounds(self) -> tuple[Tensor, Tensor]:
        return _by_chunks(self, lambda part, _: torch.stack(part.eigenvalue_bounds(), dim=1)).unbind(1)  # type: ignore[return-value]

    @override
    def project_psd(self) -> ProjectedBlocks:
        return ProjectedBlocks(self)

    @override
    def factor(self) -> Tensor:
        self.require_psd()
        return _by_chunks(self, lambda part, _: part.root())


@dataclass(frozen=True)
class ProjectedBlocks(Blocks):
    """Blocks with their negative eigenvalues set to zero, a bounded number of them at a time.

    Args:
        exact: The blocks.
    """

    exact: CurvedBlocks

    @property
    def u(self) -> Tensor:  # type: ignore[override]
        """Return the unit embeddings, shape (N, D)."""
        return self.exact.u

    def __getitem__(self, rows: slice) -> ProjectedBlocks:
        return ProjectedBlocks(self.exact[rows])

    @override
    def matmul(self, v: Tensor) -> Tensor:
        return _by_chunks(self.exact, lambda part, rows: part.project_psd().matmul(v[rows]))

    @override
    def diagonal(self) -> Tensor:
        return _by_chunks(self.exact, lambda part, _: part.project_psd().diagonal())

    @override
    def dense(self) -> Tensor:
        return _by_chunks(self.exact, lambda part, _: part.project_psd().dense())

    @override
    def total(self) -> Tensor:
        return _by_chunks(self.exact, lambda part, _: part.project_psd().total().unsqueeze(0)).sum(0)

    @override
    def factor(self) -> Tensor:
        return _by_chunks(self.exact, lambda part, _: part.root())


def _by_chunks(blocks: CurvedBlocks, compute: Callable[[DenseBlocks, slice], Tensor]) -> Tensor:
    """Apply ``compute`` to the matrices of all points, a bounded number of matrices at a time."""
    n, dim = blocks.u.shape
    step = max(1, _DENSE_ELEMENTS // (dim * dim))
    parts = []
    for start in range(0, max(n, 1), step):
        rows = slice(start, min(start + step, n))
        parts.append(compute(DenseBlocks(blocks.u[rows], blocks[rows].dense()), rows))
    return torch.cat(parts)
