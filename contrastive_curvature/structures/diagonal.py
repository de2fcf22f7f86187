"""The diagonal of the curvature: independent weights. Every entry is exact for every fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.cross import CrossBlocks
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.structures.at_features import AtFeatures, DiagonalAtFeatures
from contrastive_curvature.structures.structure import Clamped, Room, Structure, of_each_weight


@dataclass(frozen=True, eq=False)
class Diagonal(Structure):
    """Entries of the diagonal, shape (P,)."""

    name = "diag"
    weights = ("last_layer", "all", "subnetwork")
    mc_estimable = True
    priors = ("scalar", "layerwise", "diag")

    entries: Tensor

    @classmethod
    @override
    def term(cls, pullback: Pullback, context: Any, blocks: Blocks) -> Self:
        return cls(pullback.diag(context, blocks))

    @classmethod
    @override
    def coupled_term(cls, pullback: Pullback, context: Any, hessian: OutputHessian) -> Self:
        return cls(pullback.coupled_diag(context, hessian))

    @classmethod
    @override
    def cross(cls, pullback: Pullback, left: Any, right: Any, cross: CrossBlocks) -> Self:
        return cls(pullback.cross_diag(left, right, cross))

    @classmethod
    @override
    def products(cls, left: Tensor, right: Tensor) -> Self:
        return cls((left * right).sum(0))

    @classmethod
    @override
    def tile(cls, pullback: Pullback, dim: int) -> int:
        return pullback.tile_diag(dim)

    @override
    def traces(self) -> Tensor:
        return self.entries.abs().sum().reshape(1)

    @override
    def reached(self, sizes: list[int]) -> Tensor:
        return torch.stack([part.any() for part in self.entries.split(sizes)])

    @override
    def positive(self) -> Self:
        return self.map(lambda entries: entries.clamp(min=0))

    @override
    def shapes(self, room: Room) -> dict[str, Any]:
        return {"entries": (room.total,)}

    @override
    def clamped(self, sizes: list[int]) -> ClampedDiagonal:
        return ClampedDiagonal(self.entries.clamp(min=0), sizes)

    def plain(self) -> Tensor:
        """Return the entries, shape (P,)."""
        return self.entries


@dataclass(frozen=True, eq=False)
class ClampedDiagonal(Clamped):
    """A diagonal curvature; its basis is the weights themselves."""

    independent = True

    @override
    def into(self, v: Tensor) -> Tensor:
        return v

    @override
    def out_of(self, x: Tensor) -> Tensor:
        return x

    @override
    def diagonal_of(self, values: Tensor) -> Tensor:
        return values

    def plain(self) -> Tensor:
        """Return the diagonal, shape (P,)."""
        return self.values

    def posterior_precision(self, prior: Tensor, factor: float | Tensor) -> Tensor:
        """See :meth:`Clamped.posterior_precision`; returns the diagonal, shape (P,)."""
        return self.precision(of_each_weight(prior, self.sizes), factor)

    @override
    def at_features(self, dim: int, prior: Tensor, factor: float | Tensor) -> AtFeatures:
        return DiagonalAtFeatures(self.variances(prior, factor), dim)
