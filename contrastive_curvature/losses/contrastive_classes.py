"""The contrastive loss of points with class labels, from sums over classes and from points that stand for all.

Positives, and negatives without a margin, come from sums per class in O(N D). With a margin there is a blocked
N x M x D product with M columns: all points inside the margin, minus those of the same class. The columns are all N
points, or a uniform sample that stands for them.

Sums over points are kept in float64: attraction and repulsion nearly cancel in them, and float32 would lose digits with
every point that is added.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature.hessian.derivatives import NodeSums
from contrastive_curvature.losses.class_table import ClassTable
from contrastive_curvature.losses.dataset import ClassWeights, Columns, DatasetHessian, HessianPart
from contrastive_curvature.losses.weighting import Related, weigh_pairs
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


class ContrastiveOfClasses(DatasetHessian):
    """Output Hessian of the contrastive loss with class labels; no point has to know of all others.

    Args:
        loss: The loss.
        related: Shares of the classes.
        table: Numbers and sums of all classes.
        points: All N points by ascending numbers, where they are known; with a margin and without a bank they are
            needed.
        bank: Points that stand for all negatives inside the margin; of no effect without a margin.
    """

    loss: ContrastiveLoss

    def __init__(
        self,
        loss: ContrastiveLoss,
        related: Related,
        table: ClassTable,
        points: Columns | None = None,
        bank: Columns | None = None,
    ) -> None:
        super().__init__(loss, related, points, bank)
        # The counts stand in front of the sums, as the ones in front of an embedding.
        self._class_sums = torch.cat([table.counts.unsqueeze(1).double(), table.sums], dim=1)
        # Over all classes, once for all batches.
        self._total = self._class_sums.sum(0)
        self._weighted = related.shares.negative @ self._class_sums

    def sums_for(self, part: HessianPart) -> NodeSums:
        """See :meth:`DatasetHessian.sums_for`; a point is left out by its class, whatever its number."""
        return self.sums(part.u, self.related.index(part.targets), part.numbers)

    @override
    def class_weights(self) -> ClassWeights | None:
        loss, classes, shares = self.loss, self.related.relation.targets, self.related.shares
        if not loss.pairs_by_class and self.bank is None:
            return None
        if not loss.pairs_by_class or loss.pd_fix.attracting_only or not loss.negative_weight:
            return ClassWeights(classes, ((1 - loss.negative_weight) * shares.positive).to(self.related.dtype))
        same = classes.unsqueeze(1) == classes
        attract, repel = weigh_pairs(loss.negative_weight, same, ~same, shares, shares)
        return ClassWeights(classes, (attract - repel).to(self.related.dtype))

    def sums(self, u: Tensor, index: Tensor, numbers: Tensor) -> NodeSums:
        """Return ``sum_j y_ij [1, u_j]`` for B rows: of positives by class, minus that of negatives."""
        itself = torch.cat([torch.ones_like(u[:, :1]), u], dim=1).double()
        attract = (1 - self.loss.negative_weight) * self.related.shares.positive[index].unsqueeze(1)
        attract = attract * (self._class_sums[index] - itself)
        zero = attract.new_zeros(())
        whole = attract
        if self.loss.negative_weight:
            whole = attract - self.loss.negative_weight * self._negatives(u, index)
        sums = NodeSums(whole[:, 0], whole[:, 1:], None, zero)
        if not self.loss.pd_fix.attracting_only:
            return sums
        # The repelling pairs are left out of the curvature, not of the loss.
        return NodeSums(attract[:, 0], attract[:, 1:], None, zero, sums.totals(u))

    def _negatives(self, u: Tensor, index: Tensor) -> Tensor:
        """Return ``sum_j (r-_i + r-_j) / 2 [1, u_j]`` over the negatives that count, (B, 1 + D)."""
        if self.loss.threshold is None:
            own, mine = self.related.shares.negative[index].unsqueeze(1), self._class_sums[index]
            return (own * (self._total - mine) + self._weighted - own * mine) / 2
        sums = self._inside.sums(u, index)
        return sums if self.bank is None else sums * cast("Tensor", self.bank.weight)[index].unsqueeze(1)

    @cached_property
    def _inside(self) -> InsideColumns:
        """The points that may lie inside the margin of others."""
        columns = cast("Columns", self.points if self.bank is None else self.bank)
        shares = self.related.shares.negative.to(columns.u.dtype)
        return InsideColumns(columns.u, columns.index, shares, cast("float", self.loss.threshold))
