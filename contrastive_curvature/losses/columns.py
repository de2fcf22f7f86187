"""The derivatives of a pair loss over the points that others are compared with: all points, or weighted ones.

The columns are all points of a data set, or a bank: a uniform sample that stands for all negatives. A bank has other
weights than all points, and nothing else differs. For a point of class c that has n points of other classes in the data
set and m of them in the bank, one of these counts ``n / m`` times, so every sum over neighbours is unbiased; positives
are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError
from contrastive_curvature.hessian.dataset import HessianPart
from contrastive_curvature.hessian.derivatives import (
    CosineDerivatives,
    DatasetDerivatives,
    NodeSums,
    Totals,
    refuse_sampled,
)
from contrastive_curvature.losses.pair_derivatives import Met, PairBlock, pair_block, sum_pairs
from contrastive_curvature.losses.weighting import ClassShares, PointShares, pair_totals

if TYPE_CHECKING:
    from contrastive_curvature.losses.base import PairLoss


_TOGETHER = 256
"""Points of small classes that are looked at together: one product instead of many small ones."""

_PAIRS = 2**17
"""Pairs with a bank whose derivatives are computed at once: few enough for the cache of a core."""

_SAME = 1e-2
"""Distance of two unit embeddings of one point, in batches of another composition and in half precision."""


@dataclass(frozen=True)
class Columns:
    """Points that rows are compared with.

    Args:
        u: Unit embeddings, shape (M, D).
        index: Their classes, see :class:`~contrastive_curvature.losses.weighting.ClassShares`, shape (M,).
        numbers: Of the points, so that none is compared with itself, int64, shape (M,).
        positives: Whether a row counts those of its own class, or the others; ``None`` counts both.
        weight: How many points one of other classes stands for, by the class of the ROW, float64, shape (C,); ``None``
            for one.
    """

    u: Tensor
    index: Tensor
    numbers: Tensor
    positives: bool | None = None
    weight: Tensor | None = None

    @classmethod
    def bank(cls, u: Tensor, index: Tensor, numbers: Tensor, counts: Tensor) -> Columns:
        """Return points that stand for all points of other classes; ``counts`` (C,) are of the whole data set."""
        there, drawn = (every.sum() - every for every in (counts, index.bincount(minlength=len(counts))))
        return cls(u, index, numbers, False, there.double() / drawn.clamp(min=1))

    def at(self, places: Tensor) -> Columns:
        """Return some of them."""
        return replace(self, u=self.u[places], index=self.index[places], numbers=self.numbers[places])


class ColumnDerivatives(DatasetDerivatives):
    """Derivatives of any loss of pairs, from one block of rows by columns after the other.

    Args:
        loss: The loss; with a bank, of a fix that couples no points.
        related: Which points are positives of each other, and their shares.
        points: All N points by ascending numbers; ``None`` where a loss does not need them.
        bank: Points that stand for all negatives; ``None`` counts all.
    """

    def __init__(
        self, loss: PairLoss, related: ClassShares | PointShares, points: Columns | None, bank: Columns | None = None
    ) -> None:
        self.loss, self.related, self.points, self.columns = loss, related, points, bank
        self.n = self.anchors = related.n
        self.totals = related.totals
        self._by_class: Columns | None = None
        if points is not None:
            self.u = points.u
        if bank is not None and points is not None:
            order = points.index.argsort(stable=True)
            self._by_class = replace(points.at(order), positives=True)
            self._sizes = points.index.bincount(minlength=len(related.shares.positive))

    def node_sums(self) -> NodeSums:
        """See :meth:`CosineDerivatives.node_sums`."""
        assert self.points is not None
        return self._sums(self.points.u, self.points.index, self.points.numbers)

    def sums_for(self, u: Tensor, targets: Tensor, numbers: Tensor) -> NodeSums:
        """See :meth:`DatasetDerivatives.sums_for`."""
        self._check_numbers(u, numbers)
        return self._sums(u, self.related.index(targets, numbers), numbers)

    def pairs(self, x: Tensor, index: Tensor, numbers: Tensor, columns: Columns, value: bool = False) -> PairBlock:
        """Return the derivatives between B rows, unit embeddings (B, D) of classes ``index``, and M columns."""
        positive, negative = self.related.relate(index, columns.index)
        itself = numbers.unsqueeze(1) == columns.numbers
        shares = self.related.shares.to(x.dtype)
        attracts = None if columns.positives is False else positive & ~itself
        repels = None if columns.positives else negative & ~itself
        if repels is not None and columns.weight is not None:
            repels = columns.weight.to(x.dtype)[index].unsqueeze(1) * repels
        # No rule of a loss sees a point with itself, where derivatives may be infinite.
        cosine = (x @ columns.u.to(x.dtype).T).masked_fill_(itself, 0)
        return pair_block(self.loss, cosine, attracts, repels, shares[index], shares[columns.index], value)

    def between(self, rows: HessianPart, columns: HessianPart) -> tuple[Tensor, Tensor | None]:
        """See :meth:`DatasetDerivatives.between`; with a bank, the columns are points of it."""
        if self.columns is None:
            for part in (rows, columns):
                self._check_numbers(part.u, part.numbers)
        index, theirs = (self.related.index(part.targets, part.numbers) for part in (rows, columns))
        made = Columns(columns.u, theirs, columns.numbers)
        if self.columns is not None:
            made = replace(made, positives=False, weight=self.columns.weight)
        block = self.pairs(rows.u, index, rows.numbers, made)
        return block.y, block.c

    def among(self, u: Tensor, targets: Tensor, numbers: Tensor) -> CosineDerivatives:
        """See :meth:`DatasetDerivatives.among`."""
        relation = self.related.relation_of(targets)
        shares = self.related.shares[self.related.index(targets, numbers)]
        shares = shares.standing_for(self.related.totals, pair_totals(*relation.counts()))
        return self.loss.derivatives(relation, u, shares=shares.to(u.dtype))

    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`CosineDerivatives.loss_and_cost`."""
        totals = totals or self.node_sums().totals(self.u)
        return self.loss.loss_and_cost(totals, self.related.attract, self.related.dtype)

    def _sums(self, u: Tensor, index: Tensor, numbers: Tensor) -> NodeSums:
        """Return the sums over the neighbours of B rows."""
        assert self.points is not None
        if self.columns is None:
            return sum_pairs(self.loss, u, [self._met(u, index, numbers, self.points)])
        if self.loss.coupled:
            refuse_sampled(f"pd_fix={str(self.loss.pd_fix)!r} couples points with each other")
        # One column of a bank counts many times, and so does its rounding.
        x = u.detach().double()
        x = x / x.norm(dim=1, keepdim=True)
        met = []
        if self.loss.negative_weight < 1:
            met += [self._met(x, index, numbers, *part) for part in self._same_classes(index)]
        if self.loss.negative_weight:
            met.append(self._met(x, index, numbers, self.columns))
        return sum_pairs(self.loss, x, met, u.dtype, _PAIRS)

    def _met(self, x: Tensor, index: Tensor, numbers: Tensor, columns: Columns, rows: Tensor | None = None) -> Met:
        """Return the derivatives of some rows, by default all, with the same columns, to be asked for in blocks."""
        rows = torch.arange(len(x), device=x.device) if rows is None else rows
        if columns.u.dtype != x.dtype:
            wide = columns.u.to(x.dtype)
            columns = replace(columns, u=wide / wide.norm(dim=1, keepdim=True))

        def block(some: slice, value: bool) -> PairBlock:
            here = rows[some]
            return self.pairs(x[here], index[here], numbers[here], columns, value)

        return Met(rows, columns.u, block)

    def _same_classes(self, index: Tensor) -> Iterator[tuple[Columns, Tensor]]:
        """Iterate over all points of some classes, and the rows of classes ``index`` (B,) that are of the same ones.

        Small classes come together.
        """
        assert self._by_class is not None
        order = index.argsort(stable=True)
        classes, counts = index[order].unique_consecutive(return_counts=True)
        sizes = self._sizes[classes]
        group = (sizes.cumsum(0) - sizes) // _TOGETHER
        split = group.unique_consecutive(return_counts=True)[1].tolist()
        rows = group.repeat_interleave(counts).unique_consecutive(return_counts=True)[1].tolist()
        starts = self._sizes.cumsum(0) - self._sizes
        for some, here in zip(classes.split(split), order.split(rows), strict=True):
            # Ranges of points that are sorted by class, after each other.
            length = self._sizes[some]
            shift = (starts[some] - (length.cumsum(0) - length)).repeat_interleave(length)
            yield self._by_class.at(shift + torch.arange(len(shift), device=shift.device)), here.sort().values

    def _check_numbers(self, u: Tensor, numbers: Tensor) -> None:
        """Refuse rows whose numbers belonged to other points in the first pass, as those would not be left out."""
        assert self.points is not None
        known = self.points.numbers
        place = torch.searchsorted(known, numbers).clamp(max=len(known) - 1)
        same = (known[place] == numbers) & ((self.points.u[place] - u).norm(dim=1) <= _SAME)
        if not bool(same.all()):
            wanted = "the same data in every pass, in the same order"
            hint = "Turn shuffling off, or give the loader an attribute numbers."
            raise InputError("train_loader", wanted, "other points or another order", hint)
