"""The contrastive loss of a data set whose negatives are a uniform sample of points that stands for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contrastive_curvature.hessian.derivatives import NodeSums, Totals
from contrastive_curvature.losses.contrastive_classes import ContrastiveOfClasses, LabelledPoints
from contrastive_curvature.losses.sampled_refusals import UncoupledDerivatives
from contrastive_curvature.pairs.relation import LabelRelation
from contrastive_curvature.parts.class_table import ClassTable

if TYPE_CHECKING:
    from contrastive_curvature.hessian.derivatives import CosineDerivatives
    from contrastive_curvature.losses.contrastive import ContrastiveLoss

__all__ = ["SampledContrastive"]


class SampledContrastive(UncoupledDerivatives):
    """Derivatives from sums over classes and a sample: no point has to know of all others.

    The positives are exact. The sampled points of other classes stand for all points of other classes, so every sum
    over the neighbours of a point is unbiased.

    Args:
        loss: The loss.
        table: Numbers and sums of all classes.
        halves: Two halves of the sample, or empty where the loss needs sums over classes only.
        like: A tensor of the embeddings' type and device, shape (..., D).
        points: All points in the order in which :meth:`node_sums` gives them, where somebody asks for it.
    """

    def __init__(
        self,
        loss: ContrastiveLoss,
        table: ClassTable,
        halves: Sequence[LabelledPoints],
        like: Tensor,
        points: LabelledPoints | None = None,
    ) -> None:
        self.loss, self.table = loss, table
        self.n = int(table.counts.sum())
        self._points = points
        self.u = like.new_zeros(0, like.shape[-1]) if points is None else points.u
        only = loss.pd_fix.attracting_only
        self.sample = LabelledPoints(*(torch.cat(parts) for parts in zip(*halves, strict=True))) if halves else None
        self.of_classes = ContrastiveOfClasses(loss, table, like.dtype, halves, attracting_only=only)
        # The repelling pairs are left out of the curvature, not of the loss.
        self._counted = ContrastiveOfClasses(loss, table, like.dtype, halves) if only else None
        self._summed: Totals | None = None

    def node_sums(self) -> NodeSums:
        """See :meth:`CosineDerivatives.node_sums`."""
        if self._points is None:
            msg = "the points themselves were not kept"
            raise RuntimeError(msg)
        sums = self.sums_for(*self._points)
        self._summed = sums.totals(self.u)
        return sums

    def sums_for(self, u: Tensor, targets: Tensor) -> NodeSums:
        """See :meth:`DatasetDerivatives.sums_for`."""
        sums = self.of_classes.sums_for(u, targets)[0]
        if self._counted is None:
            return sums
        return replace(sums, counted=self._counted.sums_for(u, targets)[0].totals(u))

    def estimates_for(self, u: Tensor, targets: Tensor) -> list[NodeSums]:
        """See :meth:`DatasetDerivatives.estimates_for`."""
        return self.of_classes.sums_for(u, targets, apart=True)[1:]

    def class_weights(self) -> tuple[Tensor, Tensor] | None:
        """See :meth:`DatasetDerivatives.class_weights`."""
        return self.of_classes.class_weights()

    def among(self, u: Tensor, targets: Tensor) -> CosineDerivatives:
        """See :meth:`DatasetDerivatives.among`; all pairs of the given points count."""
        whole = self.loss.derivatives(LabelRelation(self.table.labels.repeat_interleave(self.table.counts)), self.u)
        return whole.among(u, targets)

    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`CosineDerivatives.loss_and_cost`."""
        found = totals or self._summed or self.node_sums().totals(self.u)
        return (self._counted or self.of_classes).loss_and_cost(found, self.u.dtype)
