"""Sums over the neighbours of a point for class labels, for whole data sets.

Positives, and negatives without a margin, come from sums per class in O(N D). With a margin there is a blocked
N x M x D product with M columns: all points inside the margin, minus those of the same class. The columns are all N
points, or a uniform sample that stands for them.

Sums over points are kept in float64: attraction and repulsion nearly cancel in them, and float32 would lose digits with
every point that is added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from contrastive_curvature.losses.weighting import ClassShares
from contrastive_curvature.parts.class_table import ClassTable
from contrastive_curvature.progress import late_bar

__all__ = ["TILE_COLUMNS", "TILE_ROWS", "InsideColumns", "LabelColumns", "add_inside"]

TILE_ROWS, TILE_COLUMNS = 512, 2048
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
        """``sum_j (r-_i + r-_j) / 2 [1, u_j]`` over the columns of other classes inside the margin.

        Args:
            u: Unit embeddings, shape (B, D).
            index: Their classes, shape (B,).

        Returns:
            Float64, shape (B, 1 + D).
        """
        sums = self._inside(u, 0, self.u.shape[0])
        self._subtract_same(sums, u, index)
        own, width = self.shares[index].unsqueeze(1).double(), u.shape[1] + 1
        return own * sums if self.uniform else (own * sums[:, :width] + sums[:, width:]) / 2

    def _subtract_same(self, sums: Tensor, u: Tensor, index: Tensor) -> None:
        """Take the columns of the same class out of sums (B, ...) over all columns inside the margin."""
        order = index.argsort(stable=True)
        groups, sizes = index[order].unique_consecutive(return_counts=True)
        pairs = int(self.counts[index].sum())
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
        for group, rows in zip(groups.tolist(), order.split(sizes.tolist()), strict=True):
            start, stop = self.bounds[group]
            if start < stop:
                sums[rows] -= self._inside(u[rows], start, stop)

    def _inside(self, u: Tensor, start: int, stop: int) -> Tensor:
        """Sum the extended columns ``start..stop`` that lie inside the margin of each row, shape (B, ...)."""
        out = u.new_zeros(u.shape[0], self.extended.shape[1], dtype=torch.float64)
        height, width = (_GPU_TILE, _GPU_TILE) if u.is_cuda else (TILE_ROWS, TILE_COLUMNS)
        starts = range(0, u.shape[0], height)
        for row in late_bar(starts, "[pairs inside the margin]") if len(starts) > _MANY_TILES else starts:
            rows = slice(row, row + height)
            for column in range(start, stop, width):
                columns = slice(column, min(column + width, stop))
                add_inside(out[rows], u[rows], self.u[columns], self.cosine, self.extended[columns])
        return out


class LabelColumns:
    """What the points of a data set have to know of all others.

    Args:
        table: Of all classes.
        shares: Shares of the points by class; all points of a class have equal counts.
        positive: Factor of the attracting pairs.
        negative: Factor of the repelling pairs, as a non-negative number.
        columns: Points that stand for all, where a margin decides which negatives count; empty lets all count.
    """

    def __init__(
        self,
        table: ClassTable,
        shares: ClassShares,
        positive: float,
        negative: float,
        columns: Sequence[InsideColumns] = (),
    ) -> None:
        self.positive, self.negative, self.columns = positive, negative, columns
        self.find, self.shares = shares.find, shares.shares
        # The counts stand in front of the sums, as the ones in front of an embedding.
        self.class_sums = torch.cat([table.counts.unsqueeze(1).double(), table.sums], dim=1)
        self.counts = table.counts
        # Over all classes, once for all batches.
        self.total = self.class_sums.sum(0)
        self.weighted = self.shares.negative.double() @ self.class_sums

    def node_sums(self, u: Tensor, labels: Tensor, *, apart: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Degrees (B,) and neighbour sums (B, D) of points of the set, each without itself.

        Args:
            u: Unit embeddings of B of the points, shape (B, D).
            labels: Their labels, shape (B,).
            apart: Whether to estimate them from each of the columns' sets alone, too.

        Returns:
            ``d`` and ``s``, in float64: from all columns; then from those of each set.
        """
        if not u.shape[0]:
            nothing = u.new_zeros(0).double(), torch.zeros_like(u).double()
            return [nothing] * (1 + (len(self.columns) if apart else 0))
        index = self.find(labels)
        itself = torch.cat([torch.ones_like(u[:, :1]), u], dim=1).double()
        attract = self.positive * self.shares.positive[index].unsqueeze(1).double()
        attracted = attract * (self.class_sums[index] - itself)
        if not self.negative:
            found = [attracted]
        else:
            found = [attracted - self.negative * part for part in self._negatives(u, index, apart)]
        return [(sums[:, 0], sums[:, 1:]) for sums in found]

    def _negatives(self, u: Tensor, index: Tensor, apart: bool) -> list[Tensor]:
        """``sum_j (r-_i + r-_j) / 2 [1, u_j]`` over the negatives that count, each (B, 1 + D)."""
        if not self.columns:
            own, mine = self.shares.negative[index].unsqueeze(1).double(), self.class_sums[index]
            return [(own * (self.total - mine) + self.weighted - own * mine) / 2]
        sets = [columns.sums(u, index) for columns in self.columns]
        counts = [columns.counts for columns in self.columns]
        whole = self._standing_for_all(torch.stack(sets).sum(0), torch.stack(counts).sum(0), index)
        parts = zip(sets, counts, strict=True) if apart else ()
        return [whole, *(self._standing_for_all(part, count, index) for part, count in parts)]

    def _standing_for_all(self, sums: Tensor, counts: Tensor, index: Tensor) -> Tensor:
        """Sums over the columns of other classes, times how many points each of them stands for."""
        return sums * (others(self.counts) / others(counts))[index].unsqueeze(1)


def others(counts: Tensor) -> Tensor:
    """Number of points of other classes, at least one, float64; from the numbers of those of each class (C,)."""
    return (counts.sum() - counts).clamp(min=1).double()


def add_inside(out: Tensor, rows: Tensor, columns: Tensor, cosine: float, values: Tensor) -> None:
    """Add to ``out`` (R, W) the values (C, W) of those columns (C, D) whose cosine with a row (R, D) is larger."""
    inside = rows @ columns.T
    inside.gt_(cosine)  # in place, as 0 and 1 of the same type: no second tile
    out += inside @ values
