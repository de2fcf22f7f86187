"""The contrastive loss of points with class labels, from sums over classes and from points that stand for all.

Positives, and negatives without a margin, come from sums per class in O(N D). With a margin there is a blocked
N x M x D product with M columns: all points inside the margin, minus those of the same class. The columns are all N
points, or a uniform sample that stands for them.

Sums over points are kept in float64: attraction and repulsion nearly cancel in them, and float32 would lose digits with
every point that is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from contrastive_curvature.hessian.derivatives import (
    ClassWeights,
    CosineDerivatives,
    DatasetDerivatives,
    NodeSums,
    Totals,
)
from contrastive_curvature.losses.class_table import ClassTable
from contrastive_curvature.losses.weighting import ClassShares, class_pairs, pair_totals, weigh_pairs
from contrastive_curvature.pairs.relation import LabelRelation
from contrastive_curvature.progress import Progress

if TYPE_CHECKING:
    from contrastive_curvature.losses.contrastive import ContrastiveLoss


_TILE_ROWS, _TILE_COLUMNS = 512, 2048
"""A tile of this size stays in the cache of one core; the product is bound by memory, not by arithmetic."""

_GPU_TILE = 8192
"""Rows and columns of a tile on a GPU, where starting a small product takes longer than the product."""

_MANY_TILES = 64
"""Rows of tiles from which on a progress bar costs nothing in comparison."""

_MANY_GROUPS = 64
"""Classes in a batch from which on pairs of the same class are listed, where they are few."""

_LISTED_NUMBERS = 2**25
"""Numbers of the embeddings of listed pairs: 128 MiB in float32."""


class LabelledPoints(NamedTuple):
    """Some points of a data set.

    Args:
        u: Unit embeddings, shape (M, D).
        labels: Class labels, shape (M,).
    """

    u: Tensor
    labels: Tensor


class InsideColumns:
    """Points that others may have inside the margin, sorted by class.

    Args:
        u: Unit embeddings, shape (M, D).
        index: Their classes, as rows of the table of all classes, shape (M,).
        shares: Of the negatives of every class, shape (C,).
        cosine: A negative counts where ``u_i . u_j`` exceeds this.
    """

    def __init__(self, u: Tensor, index: Tensor, shares: Tensor, cosine: float) -> None:
        self.cosine, self.shares = cosine, shares
        sizes = index.bincount(minlength=len(shares))
        order = index.argsort(stable=True)
        ends = sizes.cumsum(0)
        self.counts, self.starts = sizes, ends - sizes
        self.bounds = list(zip((ends - sizes).tolist(), ends.tolist(), strict=True))
        self.u = u[order]
        # One column of ones beside u gives the count and the sum of the points inside the margin in one product.
        self.extended = torch.cat([torch.ones_like(self.u[:, :1]), self.u], dim=1)
        self.uniform = bool((shares == shares[:1]).all())
        if not self.uniform:
            self.extended = torch.cat([self.extended, shares[index[order]].unsqueeze(1) * self.extended], dim=1)

    def sums(self, u: Tensor, index: Tensor) -> Tensor:
        """Return ``sum_j (r-_i + r-_j) / 2 [1, u_j]`` over the columns inside the margin, but for their own class."""
        sums = self._inside(u, 0, self.u.shape[0])
        self._subtract_same(sums, u, index)
        own, width = self.shares[index].unsqueeze(1).double(), u.shape[1] + 1
        return own * sums if self.uniform else (own * sums[:, :width] + sums[:, width:]) / 2

    def _subtract_same(self, sums: Tensor, u: Tensor, index: Tensor) -> None:
        """Take the columns of the same class out of sums (B, ...) over all columns inside the margin."""
        # One look at the device: the classes decide what is computed.
        classes, order = index.cpu().sort(stable=True)
        groups, sizes = (found.tolist() for found in classes.unique_consecutive(return_counts=True))
        bounds = [self.bounds[group] for group in groups]
        pairs = sum(size * (stop - start) for size, (start, stop) in zip(sizes, bounds, strict=True))
        if len(groups) > _MANY_GROUPS and pairs * u.shape[1] <= _LISTED_NUMBERS:
            # One product for each of many small classes would take longer than all others.
            columns = self.counts[index]
            rows = torch.arange(len(u), device=u.device).repeat_interleave(columns)
            first = columns.cumsum(0) - columns
            place = torch.arange(pairs, device=u.device) + (self.starts[index] - first).repeat_interleave(columns)
            inside = (u[rows] * self.u[place]).sum(1) > self.cosine
            rows, place = rows[inside], place[inside]
            sums.index_add_(0, rows, self.extended[place].double(), alpha=-1)
            return
        for (start, stop), rows in zip(bounds, order.to(u.device).split(sizes), strict=True):
            if start < stop:
                sums[rows] -= self._inside(u[rows], start, stop)

    def _inside(self, u: Tensor, start: int, stop: int) -> Tensor:
        """Sum the extended columns ``start..stop`` that lie inside the margin of each row, shape (B, ...)."""
        out = u.new_zeros(u.shape[0], self.extended.shape[1], dtype=torch.float64)
        height, width = (_GPU_TILE, _GPU_TILE) if u.is_cuda else (_TILE_ROWS, _TILE_COLUMNS)
        starts = range(0, u.shape[0], height)
        for row in Progress().over(starts, "[pairs inside the margin]") if len(starts) > _MANY_TILES else starts:
            rows = slice(row, row + height)
            for column in range(start, stop, width):
                columns = slice(column, min(column + width, stop))
                inside = u[rows] @ self.u[columns].T
                inside.gt_(self.cosine)  # in place, as 0 and 1 of the same type: no second tile
                out[rows] += inside @ self.extended[columns]
        return out


class ContrastiveOfClasses:
    """Sums over the neighbours of points, and weights between classes.

    Args:
        loss: The loss.
        table: Numbers and sums of all classes.
        dtype: Floating-point type of the embeddings.
        sets: Points that stand for all negatives inside the margin, in sets of which each may stand for all; of no
            effect where no margin decides which negatives count.
        attracting_only: Whether the positive pairs alone count (the ``positive`` fix, Eq. 109).
        shares: Weights of the classes, where all points of a class have equal counts; ``None`` counts the pairs of
            ``table``.
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
        self.loss, self.table = loss, table
        self.repels = bool(loss.negative_weight) and not attracting_only
        self.shares = shares or ClassShares.of_counts(table.labels, table.counts, loss.normalization, dtype)
        self._columns: list[InsideColumns] = []
        if loss.threshold is not None and self.repels:
            of_class = self.shares.shares.negative
            self._columns = [InsideColumns(s.u, self.shares.find(s.labels), of_class, loss.threshold) for s in sets]
            self._counts = torch.stack([columns.counts for columns in self._columns]).sum(0)
        # The counts stand in front of the sums, as the ones in front of an embedding.
        self._class_sums = torch.cat([table.counts.unsqueeze(1).double(), table.sums], dim=1)
        # Over all classes, once for all batches.
        self._total = self._class_sums.sum(0)
        self._weighted = self.shares.shares.negative.double() @ self._class_sums

    def neighbour_sums(self, u: Tensor, labels: Tensor, *, apart: bool = False) -> list[NodeSums]:
        """Return sums over the neighbours of B points from all sets; if ``apart``, then from each set alone, too."""
        index = self.shares.find(labels)
        itself = torch.cat([torch.ones_like(u[:, :1]), u], dim=1).double()
        attract = (1 - self.loss.negative_weight) * self.shares.shares.positive[index].unsqueeze(1).double()
        found = [attract * (self._class_sums[index] - itself)]
        if self.repels:
            found = [found[0] - self.loss.negative_weight * part for part in self._negatives(u, index, apart)]
        zero = torch.zeros((), dtype=torch.float64, device=u.device)
        return [NodeSums(sums[:, 0], sums[:, 1:], None, zero) for sums in found]

    def class_weights(self, *, attracting: bool = False) -> ClassWeights | None:
        """Return the weights of pairs, or of the positive ones; ``None`` where a margin decides which pairs count."""
        repels = self.repels and not attracting
        if repels and self.loss.threshold is not None:
            return None
        classes, shares = self.table.labels, self.shares.shares
        if not repels:
            return ClassWeights(classes, (1 - self.loss.negative_weight) * shares.positive)
        same = classes.unsqueeze(1) == classes
        attract, repel = weigh_pairs(self.loss.negative_weight, same, ~same, shares, shares)
        return ClassWeights(classes, attract - repel)

    @property
    def pairs_by_class(self) -> bool:
        """Return whether no margin decides which pairs count in the curvature."""
        return not self.repels or self.loss.threshold is None

    def repelling(self, u: Tensor, labels: Tensor, among: LabelledPoints) -> Tensor:
        """Return ``y`` of the negatives of B points among M that stand for all, each times how many it stands for."""
        mine, theirs = self.shares.find(labels), self.shares.find(among.labels)
        negative = (mine.unsqueeze(1) != theirs).to(u.dtype)
        if self._columns:
            negative = negative * self._stands_for(self._counts)[mine].unsqueeze(1).to(u.dtype)
        shares = self.shares.shares
        nothing = torch.zeros_like(negative)
        _, repel = weigh_pairs(self.loss.negative_weight, nothing, negative, shares[mine], shares[theirs])
        threshold = self.loss.threshold
        return -repel if threshold is None else -repel * (u @ among.u.T > threshold)

    def loss_and_cost(self, totals: Totals, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See :meth:`ContrastiveLoss.loss_and_cost`."""
        positive = class_pairs(self.table.counts)[0] * self.table.counts
        attract = (self.shares.shares.positive.double() * positive).sum()
        return self.loss.loss_and_cost(totals, attract, dtype)

    def _negatives(self, u: Tensor, index: Tensor, apart: bool) -> list[Tensor]:
        """Return ``sum_j (r-_i + r-_j) / 2 [1, u_j]`` over the negatives that count, each (B, 1 + D)."""
        if not self._columns:
            own, mine = self.shares.shares.negative[index].unsqueeze(1).double(), self._class_sums[index]
            return [(own * (self._total - mine) + self._weighted - own * mine) / 2]
        sets = [columns.sums(u, index) for columns in self._columns]
        pairs = [(torch.stack(sets).sum(0), self._counts)]
        if apart:
            pairs += [(part, columns.counts) for part, columns in zip(sets, self._columns, strict=True)]
        return [sums * self._stands_for(counts)[index].unsqueeze(1) for sums, counts in pairs]

    def _stands_for(self, counts: Tensor) -> Tensor:
        """Return how many points of other classes one of a sample with ``counts`` (C,) stands for, by class (C,)."""
        there, drawn = ((part.sum() - part).clamp(min=1).double() for part in (self.table.counts, counts))
        return there / drawn


class SampledContrastive(DatasetDerivatives):
    """Derivatives from sums over classes and a sample: no point has to know of all others.

    The positives are exact. The sampled points of other classes stand for all points of other classes, so every sum
    over the neighbours of a point is unbiased.

    Args:
        loss: The loss.
        table: Numbers and sums of all classes.
        halves: Two halves of the sample, or empty where the loss needs sums over classes only.
        like: A tensor of the embeddings' type and device, shape (..., D).
        points: All points in the order in which :meth:`node_sums` gives them, for callers who need that.
    """

    def __init__(
        self,
        loss: ContrastiveLoss,
        table: ClassTable,
        halves: Sequence[LabelledPoints],
        like: Tensor,
        points: LabelledPoints | None = None,
    ) -> None:
        self.loss = loss
        self.n = self.anchors = int(table.counts.sum())
        self._points = points
        self.u = like.new_zeros(0, like.shape[-1]) if points is None else points.u
        only = loss.pd_fix.attracting_only
        self.sample = LabelledPoints(*(torch.cat(parts) for parts in zip(*halves, strict=True))) if halves else None
        self.of_classes = ContrastiveOfClasses(loss, table, like.dtype, halves, attracting_only=only)
        # The repelling pairs are left out of the curvature, not of the loss.
        self._counted = ContrastiveOfClasses(loss, table, like.dtype, halves) if only else None

    def node_sums(self) -> NodeSums:
        """See :meth:`CosineDerivatives.node_sums`."""
        return self.sums_for(*cast("LabelledPoints", self._points))

    def sums_for(self, u: Tensor, targets: Tensor) -> NodeSums:
        """See :meth:`DatasetDerivatives.sums_for`."""
        sums = self.of_classes.neighbour_sums(u, targets)[0]
        if self._counted is None:
            return sums
        return replace(sums, counted=self._counted.neighbour_sums(u, targets)[0].totals(u))

    def estimates_for(self, u: Tensor, targets: Tensor) -> list[NodeSums]:
        """See :meth:`DatasetDerivatives.estimates_for`."""
        return self.of_classes.neighbour_sums(u, targets, apart=True)[1:]

    def class_weights(self) -> ClassWeights | None:
        """See :meth:`DatasetDerivatives.class_weights`."""
        return self.of_classes.class_weights()

    def among(self, u: Tensor, targets: Tensor) -> CosineDerivatives:
        """See :meth:`DatasetDerivatives.among`; all pairs of the given points count."""
        relation, counts = LabelRelation(targets), self.of_classes.table.counts
        shares = self.of_classes.shares.of(targets)
        shares = shares.standing_for(class_pairs(counts)[2], pair_totals(*relation.counts()))
        return self.loss.derivatives(relation, u, shares=shares)

    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`CosineDerivatives.loss_and_cost`."""
        found = totals or self.node_sums().totals(self.u)
        return (self._counted or self.of_classes).loss_and_cost(found, self.u.dtype)
