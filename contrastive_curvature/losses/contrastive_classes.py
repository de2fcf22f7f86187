"""The contrastive loss of points with class labels, from sums over classes and from points that stand for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from contrastive_curvature.hessian.derivatives import NodeSums, Totals
from contrastive_curvature.losses.label_sums import InsideColumns, LabelColumns, others
from contrastive_curvature.losses.weighting import ClassShares, PairFactors, class_pairs
from contrastive_curvature.parts.class_table import ClassTable

if TYPE_CHECKING:
    from contrastive_curvature.losses.contrastive import ContrastiveLoss

__all__ = ["ContrastiveOfClasses", "LabelledPoints"]


class LabelledPoints(NamedTuple):
    """Some points of a data set.

    Args:
        u: Unit embeddings, shape (M, D).
        labels: Class labels, shape (M,).
    """

    u: Tensor
    labels: Tensor


class ContrastiveOfClasses:
    """Sums over the neighbours of points, and the value of the loss.

    Args:
        loss: The loss.
        table: Numbers and sums of all classes.
        dtype: Floating-point type of the embeddings.
        sets: Points that stand for all negatives inside the margin, in sets of which each may stand for all; of no
            effect where no margin decides which negatives count.
        attracting_only: Whether the positive pairs alone count (the ``positive`` fix, Eq. 109).
        shares: Of the classes; ``None`` counts the pairs of ``table``.
    """

    def __init__(
        self,
        loss: ContrastiveLoss,
        table: ClassTable,
        dtype: torch.dtype,
        sets: Sequence[LabelledPoints] = (),
        *,
        attracting_only: bool = False,
        shares: ClassShares | None = None,
    ) -> None:
        self.loss, self.table, self.attracting_only = loss, table, attracting_only
        self.factors = PairFactors(1 - loss.negative_weight, loss.negative_weight)
        self.shares = shares or ClassShares.of_counts(table.labels, table.counts, loss.normalization, dtype)
        self._counts: Tensor | None = None
        columns: list[InsideColumns] = []
        negative = 0.0 if attracting_only else self.factors.negative
        if loss.threshold is not None and negative:
            of_class = self.shares.shares.negative
            columns = [InsideColumns(s.u, self.shares.find(s.labels), of_class, loss.threshold) for s in sets]
            self._counts = torch.stack([column.counts for column in columns]).sum(0)
        self._columns = LabelColumns(table, self.shares, self.factors.positive, negative, columns)

    def sums_for(self, u: Tensor, labels: Tensor, *, apart: bool = False) -> list[NodeSums]:
        """Sums over the neighbours of points of this set.

        Args:
            u: Unit embeddings of B of the points, shape (B, D).
            labels: Their labels, shape (B,).
            apart: Whether to estimate them from each set alone, too.

        Returns:
            From all sets; then from each of them.
        """
        found = self._columns.node_sums(u, labels, apart=apart)
        zero = torch.zeros((), dtype=torch.float64, device=u.device)
        return [NodeSums(degree, neighbors, None, zero) for degree, neighbors in found]

    def class_weights(self, *, attracting: bool = False) -> tuple[Tensor, Tensor] | None:
        """The class labels (C,), and ``y`` between any two classes; ``None`` where a margin decides.

        Args:
            attracting: Whether only the positive pairs count.

        Returns:
            ``y`` of shape (C, C); or (C,), its diagonal, where only positive pairs count.
        """
        repels = self.factors.negative and not (self.attracting_only or attracting)
        if repels and self.loss.threshold is not None:
            return None
        classes, shares = self.table.labels, self.shares.shares
        if not repels:
            return classes, self.factors.positive * shares.positive
        same = classes.unsqueeze(1) == classes
        attract, repel = self.factors.weigh(same, ~same, shares, shares)
        return classes, attract - repel

    @property
    def pairs_by_class(self) -> bool:
        """Whether no margin decides which pairs count in the curvature."""
        return self.attracting_only or self.loss.threshold is None or not self.factors.negative

    def repelling(self, u: Tensor, labels: Tensor, among: LabelledPoints) -> Tensor:
        """``y`` of the negatives of points among those that stand for all, each times how many it stands for.

        Args:
            u: Unit embeddings, shape (B, D).
            labels: Their labels, shape (B,).
            among: Some of the points of the sets, M of them.

        Returns:
            Shape (B, M), not positive.
        """
        mine, theirs = self.shares.find(labels), self.shares.find(among.labels)
        negative = (mine.unsqueeze(1) != theirs).to(u.dtype)
        if self._counts is not None:
            negative = negative * (others(self.table.counts) / others(self._counts))[mine].unsqueeze(1).to(u.dtype)
        shares = self.shares.shares
        _, repel = self.factors.weigh(torch.zeros_like(negative), negative, shares[mine], shares[theirs])
        threshold = self.loss.threshold
        return -repel if threshold is None else -repel * (u @ among.u.T > threshold)

    def loss_and_cost(self, totals: Totals, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Value of the loss, and its non-negative version, which counts every repelling pair from the margin.

        Without a margin it counts them from the largest distance, 2, as ``(4 - |u_i - u_j|^2) / 2``.

        Args:
            totals: Of all points.
            dtype: Of the result.
        """
        value = (totals.degree - totals.along) / 2
        if not self.factors.negative:
            return value.to(dtype), value.to(dtype)
        positive = class_pairs(self.table.counts)[0] * self.table.counts
        attract = self.factors.positive * (self.shares.shares.positive.double() * positive).sum()
        repelling = (attract - totals.degree) / 2
        margin = self.loss.margin
        cost = value + (2 if margin is None else margin**2 / 2) * repelling
        return (value if margin is None else cost).to(dtype), cost.to(dtype)
