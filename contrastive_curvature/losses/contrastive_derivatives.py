"""The pair weights of the contrastive loss, with a fast path for class labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contrastive_curvature.hessian.derivatives import NodeSums, Totals
from contrastive_curvature.losses.derivatives import PairDerivatives
from contrastive_curvature.losses.label_sums import LabelColumns
from contrastive_curvature.pairs.relation import LabelRelation

if TYPE_CHECKING:
    from contrastive_curvature.losses.contrastive import ContrastiveLoss

__all__ = ["ContrastiveDerivatives"]


class ContrastiveDerivatives(PairDerivatives):
    """``y`` (N, N) of the contrastive loss; see :class:`PairDerivatives`.

    For class labels, sums over neighbours come from sums over classes, in float64.
    """

    loss: ContrastiveLoss
    _label_columns: LabelColumns | None = None

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
        if self._label_columns is None:
            negative = 0.0 if self.attracting_only else self.factors.negative
            factors = (self.factors.positive, negative, self.loss.threshold)
            self._label_columns = LabelColumns(self.u, self.relation.targets, *factors, self.shares)
        degree, neighbors = self._label_columns.node_sums(u, targets)
        return NodeSums(degree, neighbors, None, degree.new_zeros((), dtype=torch.float64))

    def class_weights(self) -> tuple[Tensor, Tensor] | None:
        """See :meth:`DatasetDerivatives.class_weights`."""
        repels = self.factors.negative and not self.attracting_only
        if not isinstance(self.relation, LabelRelation) or (repels and self.loss.threshold is not None):
            return None
        classes = self.relation.targets.unique()
        same = classes.unsqueeze(1) == classes
        shares = self.shares_for(classes)
        # Without a margin, which would look at the cosines.
        cosine = torch.ones(same.shape, dtype=self.u.dtype, device=self.u.device)
        return classes, self._block(same, ~same, cosine, shares, shares)[0]

    def _loss_and_cost(self, totals: Totals) -> tuple[Tensor, Tensor]:
        """The non-negative version counts every repelling pair from the margin.

        Without a margin it counts them from the largest distance, 2, as ``(4 - |u_i - u_j|^2) / 2``.
        """
        dtype = self.u.dtype
        value = (totals.degree - totals.along) / 2
        if not self.factors.negative:
            return value.to(dtype), value.to(dtype)
        attract = self.factors.positive * (self.shares.positive.double() * self.relation.counts()[0]).sum()
        repelling = (attract - totals.degree) / 2
        margin = self.loss.margin
        cost = value + (2 if margin is None else margin**2 / 2) * repelling
        return (value if margin is None else cost).to(dtype), cost.to(dtype)
