"""The diagonal blocks ``H_ii`` of losses with second derivatives in the cosines: a closed form and a moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature.hessian.blocks import Blocks, DenseBlocks, UnrepresentableError
from contrastive_curvature.hessian.moments import Moments
from contrastive_curvature.hessian.sphere import project_tangent

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
        low = torch.finfo(self.n.dtype).tiny ** 0.5
        held = (self.moments.bound() / self.n / self.n).isfinite() & (self.n >= low) & (self.n <= 1 / low)
        if not bool(held.all()):
            raise UnrepresentableError.at(self.n, held)

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
    """Compute something of every point's matrix, with a bounded number of matrices at a time."""
    n, dim = blocks.u.shape
    step = max(1, _DENSE_ELEMENTS // (dim * dim))
    parts = []
    for start in range(0, max(n, 1), step):
        rows = slice(start, min(start + step, n))
        parts.append(compute(DenseBlocks(blocks.u[rows], blocks[rows].dense()), rows))
    return torch.cat(parts)
