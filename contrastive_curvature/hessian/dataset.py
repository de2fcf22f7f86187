"""The output Hessian of a data set, for points that arrive in batches, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.cross import CrossBlocks, tangent_axes
from contrastive_curvature.hessian.derivatives import DatasetDerivatives, NodeSums, Totals
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
        numbers: Of the points, int64, shape (B,).
    """

    u: Tensor
    n: Tensor
    targets: Tensor
    numbers: Tensor

    def __getitem__(self, rows: slice) -> HessianPart:
        """Return some of them."""
        return HessianPart(self.u[rows], self.n[rows], self.targets[rows], self.numbers[rows])

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
        derivatives: Of the loss in the cosines.
        distance: Which split of the generalised Gauss-Newton.
        pd_fix: The fix for positive definiteness.
        halves: Where a bank stands for all negatives, the derivatives with each half of it.
    """

    def __init__(
        self,
        derivatives: DatasetDerivatives,
        distance: Distance,
        pd_fix: PDFix,
        halves: Sequence[DatasetDerivatives] = (),
    ) -> None:
        self.derivatives, self.halves = derivatives, halves
        self.distance, self.pd_fix = distance, pd_fix
        self.coupled = pd_fix.coupled

    def __len__(self) -> int:
        return self.derivatives.n

    def place(self, z: Tensor, targets: Tensor, numbers: Tensor) -> HessianPart:
        """Return some of the points without their blocks; arguments as in :meth:`at`."""
        return HessianPart(*normalize(z), targets, numbers.to(z.device))

    def at(self, z: Tensor, targets: Tensor, numbers: Tensor) -> HessianPoints:
        """Return some of the points, raw outputs (B, D), targets (B, ...) and numbers (B,), with their blocks."""
        part = self.place(z, targets, numbers)
        blocks, sums = self._blocks(part, self.derivatives)
        return HessianPoints(part.u, part.n, targets, part.numbers, blocks, sums.totals(part.u))

    def estimates_at(self, z: Tensor, targets: Tensor, numbers: Tensor) -> list[Blocks]:
        """Return the blocks of :meth:`at` from each half of a bank, as independent estimates."""
        part = self.place(z, targets, numbers)
        return [self._blocks(part, half)[0] for half in self.halves]

    def among(self, z: Tensor, targets: Tensor, numbers: Tensor) -> OutputHessian:
        """Return the Hessian of some of the points among themselves, which stands for that of the whole set."""
        derivatives = self.derivatives.among(normalize(z)[0], targets, numbers.to(z.device))
        return OutputHessian(z, derivatives, self.distance, self.pd_fix)

    def cross(self, rows: HessianPart, columns: HessianPart) -> CrossBlocks:
        """Return the blocks ``H_ij`` between two parts, zero for a point with itself."""
        y, c = self.derivatives.between(rows, columns)
        return CrossBlocks(rows.u, rows.n, columns.u, columns.n, y, c)

    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`CosineDerivatives.loss_and_cost`."""
        return self.derivatives.loss_and_cost(totals)

    def _blocks(self, part: HessianPart, derivatives: DatasetDerivatives) -> tuple[Blocks, NodeSums]:
        sums = derivatives.sums_for(part.u, part.targets, part.numbers)
        return make_blocks(part.u, part.n, sums, self.distance, self.pd_fix), sums
