"""The leading eigenpairs of the curvature over a whole data set, from products with it; they cannot be added."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature.structures.base import Against, Clamped, Room, Structure, of_each_weight


@dataclass(frozen=True, eq=False)
class Eigenpairs(Structure):
    """Eigenvectors as columns (P, R) and positive eigenvalues (R,)."""

    name = "lowrank"
    weights = ("all",)
    adds = False
    priors = ("scalar", "layerwise", "diag")

    vectors: Tensor
    values: Tensor

    @override
    def shapes(self, room: Room) -> dict[str, Any]:
        return {"vectors": (room.total, len(self.values)), "values": (None,)}

    @override
    def traces(self) -> Tensor:
        return self.values.sum().reshape(1)

    @override
    def clamped(self, sizes: list[int]) -> ClampedEigenpairs:
        rest = self.values.new_zeros(len(self.vectors))
        return ClampedEigenpairs(torch.cat([self.values, rest]), sizes, self.vectors)

    def plain(self) -> tuple[Tensor, Tensor]:
        """Return eigenvectors and eigenvalues."""
        return self.vectors, self.values


@dataclass(frozen=True, eq=False)
class ClampedEigenpairs(Clamped):
    """The columns of ``B`` are the eigenvectors ``V``, then ``I - V V^T``, P columns of rank P - R.

    Attributes:
        vectors: ``V``, orthonormal columns, shape (P, R).
    """

    vectors: Tensor

    @property
    def times(self) -> Tensor:
        """See :attr:`Clamped.times`; the P columns of the complement count as P - R eigenvalues."""
        total, rank = self.vectors.shape
        times = torch.ones_like(self.values)
        times[rank:] = 1 - rank / total
        return times

    @override
    def into(self, v: Tensor) -> Tensor:
        along = v @ self.vectors
        return torch.cat([along, v - along @ self.vectors.T], -1)

    @override
    def out_of(self, x: Tensor) -> Tensor:
        along, across = x.split([self.vectors.shape[1], len(self.vectors)], -1)
        return along @ self.vectors.T + across

    def against(self, prior: Tensor) -> Against:
        """See :meth:`Clamped.against`; every prior that is not one number needs its own decomposition of R columns."""
        d, rank = of_each_weight(prior, self.sizes), self.vectors.shape[1]
        if prior.numel() == 1:
            return Against(self, d[:1].expand(len(self.values)), 1.0)
        scale = d.rsqrt()
        wide = (scale.unsqueeze(1) * self.vectors * self.values[:rank].sqrt()).double()
        vectors, roots, _ = torch.linalg.svd(wide, full_matrices=False)
        values = torch.cat([roots.square().to(self.values), self.values[rank:]])
        basis = replace(self, values=values, vectors=vectors.to(self.vectors))
        return Against(basis, torch.ones_like(values), scale)

    @override
    def diagonal(self) -> Tensor:
        return self.vectors.square() @ self.values[: self.vectors.shape[1]]

    def posterior_precision(self, prior: Tensor, factor: float | Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """See :meth:`Clamped.posterior_precision`; returns the eigenpairs, and the prior of every weight."""
        vectors, values = self.plain()
        return (vectors, factor * values), of_each_weight(prior, self.sizes)

    def plain(self) -> tuple[Tensor, Tensor]:
        """Return eigenvectors (P, R) and eigenvalues (R,)."""
        return self.vectors, self.values[: self.vectors.shape[1]]
