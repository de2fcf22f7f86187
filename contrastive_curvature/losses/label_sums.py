"""Sums over the neighbours of a point for class labels, for whole data sets.

Positives, and negatives without a margin, come from sums per class in O(N D). With a margin there is one blocked
N x N x D product: all points inside the margin, minus those of the same class.

Sums over points are kept in float64: attraction and repulsion nearly cancel in them, and float32 would lose digits with
every point that is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.losses.weighting import ClassShares, Shares
from contrastive_curvature.progress import late_bar

__all__ = ["CHUNK_ROWS", "TILE_COLUMNS", "TILE_ROWS", "LabelColumns", "add_inside"]

TILE_ROWS, TILE_COLUMNS = 512, 2048
"""A tile of this size stays in the cache of one core; the product is bound by memory, not by arithmetic."""

_MANY_TILES = 64
"""Rows of tiles from which on a progress bar costs nothing in comparison."""

CHUNK_ROWS = 2**16
"""Points that are held in float64 at once."""


class LabelColumns:
    """All N points, sorted by class, ready to be summed over for any rows.

    Args:
        u: Unit embeddings, shape (N, D).
        labels: Integer labels, shape (N,).
        positive: Factor of the attracting pairs.
        negative: Factor of the repelling pairs, as a non-negative number.
        cosine: A negative counts where ``u_i . u_j`` exceeds this; ``None`` lets all count.
        shares: Shares of the points; they depend on the class only, since all points of a class have equal counts.
    """

    def __init__(
        self, u: Tensor, labels: Tensor, positive: float, negative: float, cosine: float | None, shares: Shares
    ) -> None:
        self.positive, self.negative, self.cosine = positive, negative, cosine
        table = ClassShares(labels, shares)
        self.find, self.shares, self.classes = table.find, table.shares, table.classes
        _, inverse, sizes = labels.unique(return_inverse=True, return_counts=True)
        order = inverse.argsort(stable=True)
        ends = sizes.cumsum(0)
        self.bounds = list(zip((ends - sizes).tolist(), ends.tolist(), strict=True))
        self.u = u[order]
        # One column of ones beside u gives the count and the sum of the points inside the margin in one product.
        self.extended = torch.cat([torch.ones_like(self.u[:, :1]), self.u], dim=1)
        self.class_sums = u.new_zeros(self.classes.numel(), self.extended.shape[1], dtype=torch.float64)
        for rows, index in zip(self.extended.split(CHUNK_ROWS), inverse[order].split(CHUNK_ROWS), strict=True):
            self.class_sums.index_add_(0, index, rows.double())
        self.uniform = bool((self.shares.negative == self.shares.negative[:1]).all())
        if not self.uniform:
            share = self.shares.negative[inverse[order]].unsqueeze(1)
            self.extended = torch.cat([self.extended, share * self.extended], dim=1)

    def node_sums(self, u: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Degrees (B,) and neighbour sums (B, D) of points of the set, each without itself.

        Args:
            u: Unit embeddings of B of the points, shape (B, D).
            labels: Their labels, shape (B,).

        Returns:
            ``d`` and ``s``, in float64.
        """
        if not u.shape[0]:
            return u.new_zeros(0).double(), torch.zeros_like(u).double()
        index = self.find(labels)
        itself = torch.cat([torch.ones_like(u[:, :1]), u], dim=1).double()
        attract = self.positive * self.shares.positive[index].unsqueeze(1).double()
        sums = attract * (self.class_sums[index] - itself)
        if self.negative:
            sums = sums - self.negative * self._negatives(u, index)
        return sums[:, 0], sums[:, 1:]

    def _negatives(self, u: Tensor, index: Tensor) -> Tensor:
        """``sum_j (r-_i + r-_j) / 2 [1, u_j]`` over the negatives that count, shape (B, 1 + D)."""
        width = self.class_sums.shape[1]
        own = self.shares.negative[index].unsqueeze(1).double()
        if self.cosine is None:
            everything = self.class_sums.sum(0) - self.class_sums[index]
            weighted = self.shares.negative.unsqueeze(1) * self.class_sums
            return (own * everything + weighted.sum(0) - weighted[index]) / 2
        cosine = self.cosine
        sums = self._inside(u, cosine, 0, self.u.shape[0])
        order = index.argsort(stable=True)
        groups, sizes = index[order].unique_consecutive(return_counts=True)
        for group, rows in zip(groups.tolist(), order.split(sizes.tolist()), strict=True):
            sums[rows] -= self._inside(u[rows], cosine, *self.bounds[group])
        return own * sums if self.uniform else (own * sums[:, :width] + sums[:, width:]) / 2

    def _inside(self, u: Tensor, cosine: float, start: int, stop: int) -> Tensor:
        """Sum the extended columns ``start..stop`` that lie inside the margin of each row, shape (B, ...)."""
        out = u.new_zeros(u.shape[0], self.extended.shape[1], dtype=torch.float64)
        starts = range(0, u.shape[0], TILE_ROWS)
        for row in late_bar(starts, "[pairs inside the margin]") if len(starts) > _MANY_TILES else starts:
            rows = slice(row, row + TILE_ROWS)
            for column in range(start, stop, TILE_COLUMNS):
                columns = slice(column, min(column + TILE_COLUMNS, stop))
                add_inside(out[rows], u[rows], self.u[columns], cosine, self.extended[columns])
        return out


def add_inside(out: Tensor, rows: Tensor, columns: Tensor, cosine: float, values: Tensor) -> None:
    """Add to ``out`` (R, W) the values (C, W) of those columns (C, D) whose cosine with a row (R, D) is larger."""
    inside = rows @ columns.T
    inside.gt_(cosine)  # in place, as 0 and 1 of the same type: no second tile
    out += inside @ values
