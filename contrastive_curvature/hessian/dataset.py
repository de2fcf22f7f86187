"""The output Hessian of a data set, for points that arrive in batches, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.cross import CrossBlocks, tangent_axes
from contrastive_curvature.hessian.derivatives import DatasetDerivatives, Totals
from contrastive_curvature.hessian.output import OutputHessian, make_blocks
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.options import Distance, PDFix


@dataclass(frozen=True)
class HessianPart:
    """Some points of a data set.

    Args:
        u: Unit embeddings, shape (B, D).
        n: Norms of the raw outputs, shape (B,).
        targets: Labels or targets, shape (B, ...).
    """

    u: Tensor
    n: Tensor
    targets: Tensor

    def tangent_axes(self) -> Tensor:
        """Return ``P_i e_k / n_i`` for every output axis k, shape (B, D, D)."""
        return tangent_axes(self.u, self.n)


@dataclass(frozen=True)
class HessianPoints(HessianPart):
    """Some points of a data set, with their diagonal blocks over ALL its pairs.

    Args:
        blocks: Their diagonal blocks.
        totals: Their part in the value of the loss.
    """

    blocks: Blocks
    totals: Totals


class DatasetHessian:
    """Output Hessian over all pairs of a data set.

    Args:
        z: Raw outputs of all N points, in the order of the first pass over the data, shape (N, D); ``None`` where the
            points were not kept.
        derivatives: Of the loss in their cosines.
        distance: Which split of the generalised Gauss-Newton.
        pd_fix: The fix for positive definiteness.
        halves: Where the derivatives are an estimate from a sample, those from its two halves, unless they give them.
    """

    def __init__(
        self,
        z: Tensor | None,
        derivatives: DatasetDerivatives,
        distance: Distance,
        pd_fix: PDFix,
        halves: Sequence[DatasetDerivatives] = (),
    ) -> None:
        self.z, self._halves = z, halves
        self.derivatives = derivatives
        self.distance, self.pd_fix = distance, pd_fix
        self.coupled = pd_fix.coupled

    def __len__(self) -> int:
        return self.derivatives.n

    def whole(self) -> OutputHessian:
        """Return the Hessian of all points at once, in the order of the first pass, if they were kept."""
        return OutputHessian(cast("Tensor", self.z), self.derivatives, self.distance, self.pd_fix)

    def place(self, z: Tensor, targets: Tensor) -> HessianPart:
        """Return some of the points, recognised by their targets, without their blocks; arguments as in :meth:`at`."""
        return HessianPart(*normalize(z), targets)

    def at(self, z: Tensor, targets: Tensor) -> HessianPoints:
        """Return some of the points, raw outputs (B, D) recognised by their targets (B, ...), with their blocks."""
        u, n = normalize(z)
        sums = self.derivatives.sums_for(u, targets)
        blocks = make_blocks(u, n, sums, self.distance, self.pd_fix)
        return HessianPoints(u, n, targets, blocks, sums.totals(u))

    def estimates_at(self, z: Tensor, targets: Tensor) -> list[Blocks]:
        """Return independent estimates of the blocks of :meth:`at`, two where these are an estimate themselves."""
        u, n = normalize(z)
        found = self.derivatives.estimates_for(u, targets) or [half.sums_for(u, targets) for half in self._halves]
        return [make_blocks(u, n, sums, self.distance, self.pd_fix) for sums in found]

    def among(self, z: Tensor, targets: Tensor) -> OutputHessian:
        """Return the Hessian of some of the points among themselves, which stands for that of the whole set."""
        return OutputHessian(z, self.derivatives.among(normalize(z)[0], targets), self.distance, self.pd_fix)

    def cross(self, rows: HessianPart, columns: HessianPart, itself: Tensor) -> CrossBlocks:
        """Return the blocks ``H_ij`` between two parts, zero for a point with ``itself``, boolean, shape (A, B)."""
        y, c = self.derivatives.between(rows.u, rows.targets, columns.u, columns.targets, itself)
        return CrossBlocks(rows.u, rows.n, columns.u, columns.n, y, c)

    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`CosineDerivatives.loss_and_cost`."""
        return self.derivatives.loss_and_cost(totals)
