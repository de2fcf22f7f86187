"""The pair weights of the contrastive loss, with a fast path for class labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from contrastive_curvature.hessian.derivatives import NodeSums, Totals
from contrastive_curvature.losses.contrastive_classes import ContrastiveOfClasses, LabelledPoints
from contrastive_curvature.losses.derivatives import PairDerivatives
from contrastive_curvature.losses.weighting import ClassShares
from contrastive_curvature.pairs.relation import LabelRelation
from contrastive_curvature.parts.class_table import ClassTable

if TYPE_CHECKING:
    from contrastive_curvature.losses.contrastive import ContrastiveLoss

__all__ = ["ContrastiveDerivatives"]


class ContrastiveDerivatives(PairDerivatives):
    """``y`` (N, N) of the contrastive loss; see :class:`PairDerivatives`.

    For class labels, sums over neighbours come from sums over classes, in float64.
    """

    loss: ContrastiveLoss
    _found: ContrastiveOfClasses | None = None

    def node_sums(self) -> NodeSums:
        """See :meth:`CosineDerivatives.node_sums`."""
        if not isinstance(self.relation, LabelRelation):
            return super().node_sums()
        sums = self.sums_for(self.u, self.relation.targets)
        self._summed = sums.totals(self.u)
        return sums

    def sums_for(self, u: Tensor, targets: Tensor) -> NodeSums:
        """See :meth:`DatasetDerivatives.sums_for`."""
        if not isinstance(self.relation, LabelRelation):
            return super().sums_for(u, targets)
        return self._of_classes(self.relation).sums_for(u, targets)[0]

    def class_weights(self) -> tuple[Tensor, Tensor] | None:
        """See :meth:`DatasetDerivatives.class_weights`."""
        if not isinstance(self.relation, LabelRelation):
            return None
        return self._of_classes(self.relation).class_weights()

    def _of_classes(self, relation: LabelRelation) -> ContrastiveOfClasses:
        if self._found is None:
            labels = relation.targets
            self._found = ContrastiveOfClasses(
                self.loss,
                ClassTable.of(self.u, labels, unit=True),
                self.u.dtype,
                [LabelledPoints(self.u, labels)],
                attracting_only=self.attracting_only,
                shares=ClassShares(labels, self.shares),
            )
        return self._found

    def _loss_and_cost(self, totals: Totals) -> tuple[Tensor, Tensor]:
        """See :meth:`ContrastiveOfClasses.loss_and_cost`."""
        dtype = self.u.dtype
        if isinstance(self.relation, LabelRelation):
            return self._of_classes(self.relation).loss_and_cost(totals, dtype)
        value = (totals.degree - totals.along) / 2
        if not self.factors.negative:
            return value.to(dtype), value.to(dtype)
        attract = self.factors.positive * (self.shares.positive.double() * self.relation.counts()[0]).sum()
        margin = self.loss.margin
        cost = value + (2 if margin is None else margin**2 / 2) * (attract - totals.degree) / 2
        return (value if margin is None else cost).to(dtype), cost.to(dtype)
