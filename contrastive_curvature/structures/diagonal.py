"""The diagonal of the curvature: independent weights. Exact for every fix, as all of its entries are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.cross import CrossBlocks
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.structures.at_features import AtFeatures, DiagonalAtFeatures
from contrastive_curvature.structures.base import Clamped, Room, Structure, of_each_weight


@dataclass(frozen=True, eq=False)
class Diagonal(Structure):
    """Entries of the diagonal, shape (P,)."""

    name = "diag"
    weights = ("last_layer", "all", "subnetwork")
    mc_estimable = True
    priors = ("scalar", "layerwise", "diag")

    entries: Tensor

    @classmethod
    def term(cls, pullback: Pullback, context: Any, blocks: Blocks) -> Self:
        """See :meth:`Structure.term`."""
        return cls(pullback.diag(context, blocks))

    @classmethod
    def coupled_term(cls, pullback: Pullback, context: Any, hessian: OutputHessian) -> Self:
        """See :meth:`Structure.coupled_term`."""
        return cls(pullback.coupled_diag(context, hessian))

    @classmethod
    def cross(cls, pullback: Pullback, left: Any, right: Any, cross: CrossBlocks) -> Self:
        """See :meth:`Structure.cross`."""
        return cls(pullback.cross_diag(left, right, cross))

    @classmethod
    def products(cls, left: Tensor, right: Tensor) -> Self:
        """See :meth:`Structure.products`."""
        return cls((left * right).sum(0))

    @classmethod
    def tile(cls, pullback: Pullback, dim: int) -> int:
        """See :meth:`Structure.tile`."""
        return pullback.tile_diag(dim)

    def traces(self) -> Tensor:
        """See :meth:`Structure.traces`."""
        return self.entries.abs().sum().reshape(1)

    def positive(self) -> Self:
        """See :meth:`Structure.positive`."""
        return self.map(lambda entries: entries.clamp(min=0))

    def shapes(self, room: Room) -> dict[str, Any]:
        """See :meth:`Structure.shapes`."""
        return {"entries": (room.total,)}

    def clamped(self, sizes: list[int]) -> ClampedDiagonal:
        """See :meth:`Structure.clamped`."""
        return ClampedDiagonal(self.entries.clamp(min=0), sizes)

    def plain(self) -> Tensor:
        """Return the entries, shape (P,)."""
        return self.entries


@dataclass(frozen=True, eq=False)
class ClampedDiagonal(Clamped):
    """The basis is that of the weights themselves."""

    def into(self, v: Tensor) -> Tensor:
        """See :meth:`Clamped.into`."""
        return v

    def out_of(self, x: Tensor) -> Tensor:
        """See :meth:`Clamped.out_of`."""
        return x

    def diagonal(self) -> Tensor:
        """See :meth:`Clamped.diagonal`."""
        return self.values

    def plain(self) -> Tensor:
        """Return the diagonal, shape (P,)."""
        return self.values

    def posterior_precision(self, prior: Tensor, factor: float | Tensor) -> Tensor:
        """See :meth:`Clamped.posterior_precision`; its diagonal, shape (P,)."""
        return self.precision(of_each_weight(prior, self.sizes), factor)

    def variances(self, prior: Tensor, factor: float | Tensor) -> Tensor:
        """See :meth:`Clamped.variances`."""
        return 1 / self.posterior_precision(prior, factor)

    def at_features(self, dim: int, prior: Tensor, factor: float | Tensor) -> AtFeatures:
        """See :meth:`Clamped.at_features`."""
        return DiagonalAtFeatures(self.variances(prior, factor), dim)
