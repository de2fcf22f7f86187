"""The output Hessian over all pairs of a data set, for points in batches, in any order.

A point is compared with columns: all points of the data set, or a bank, which is a uniform sample that represents all
negatives. The bank differs only in its weights. Let n points of the data set and m points of the bank have another
class than the point of a row. Then each of the m points counts ``n / m`` times, so every sum over neighbours is
unbiased; positives are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from contrastive_curvature import waiting
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.cross import CrossBlocks
from contrastive_curvature.hessian.derivatives import NodeSums, Totals
from contrastive_curvature.hessian.output import make_blocks
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses.class_table import ClassTable
from contrastive_curvature.losses.pair_derivatives import Met, PairBlock, pair_block, sum_pairs, warn_of_many
from contrastive_curvature.losses.weighting import Related
from contrastive_curvature.pairs.relation import RelationFunction, make_target_relation
from contrastive_curvature.pairs.rows import Rows

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
        index: Classes of the points, see :class:`~contrastive_curvature.losses.weighting.Related`, shape (M,).
        numbers: Numbers of the points, so that no point is compared with itself, int64, shape (M,).
        positives: ``True`` counts only a row's positives, ``False`` only its negatives, ``None`` both.
        weight: How often a point of another class counts, by the class of the ROW, float64, shape (C,); ``None`` for
            once.
    """

    u: Tensor
    index: Tensor
    numbers: Tensor
    positives: bool | None = None
    weight: Tensor | None = None

    @classmethod
    def bank(cls, u: Tensor, index: Tensor, numbers: Tensor, counts: Tensor) -> Columns:
        """Make columns that represent all points of other classes; ``counts`` (C,) is for the whole data set."""
        there, drawn = (every.sum() - every for every in (counts, index.bincount(minlength=len(counts))))
        return cls(u, index, numbers, False, there.double() / drawn.clamp(min=1))

    def at(self, places: Tensor) -> Columns:
        """Return some of the points."""
        return replace(self, u=self.u[places], index=self.index[places], numbers=self.numbers[places])


@dataclass(frozen=True)
class HessianPart:
    """Some points of a data set.

    Args:
        u: Unit embeddings, shape (B, D).
        n: Norms of the raw outputs, shape (B,).
        targets: Labels or targets, shape (B, ...).
        numbers: Numbers of the points, int64, shape (B,).
    """

    u: Tensor
    n: Tensor
    targets: Tensor
    numbers: Tensor

    def __getitem__(self, rows: slice) -> HessianPart:
        """Return some of the points."""
        return HessianPart(self.u[rows], self.n[rows], self.targets[rows], self.numbers[rows])


@dataclass(frozen=True)
class HessianPoints(HessianPart):
    """Some points of a data set, with their diagonal blocks over ALL pairs of the data set.

    Args:
        blocks: Diagonal blocks of these points.
        totals: Part of these points in the value of the loss.
    """

    blocks: Blocks
    totals: Totals


class ClassWeights(NamedTuple):
    """Weights of pairs that depend only on the classes of the two points.

    Args:
        classes: Class labels, ascending, shape (C,).
        y: ``y`` between any two classes, shape (C, C); or the diagonal (C,), if all other weights are zero.
    """

    classes: Tensor
    y: Tensor


class DatasetHessian:
    """Output Hessian over all pairs of a data set, computed block by block.

    Args:
        loss: The loss, with the distance and the fix of its curvature; with a bank, the fix must not couple points.
        related: Relation and shares of the points, by class.
        points: All N points by ascending numbers; ``None`` where a loss does not need them.
        bank: Sampled points that represent all negatives; ``None`` compares with all points.

    Attributes:
        coupled: Whether the fix keeps cross terms.
    """

    def __init__(self, loss: PairLoss, related: Related, points: Columns | None, bank: Columns | None = None) -> None:
        self.loss, self.related, self.points, self.bank = loss, related, points, bank
        self.coupled = loss.coupled
        self._by_class: Columns | None = None
        if bank is not None and points is not None:
            order = points.index.argsort(stable=True)
            self._by_class = replace(points.at(order), positives=True)
            self._sizes = points.index.bincount(minlength=len(related.shares.positive)).cpu()

    def place(self, z: Tensor, targets: Tensor, numbers: Tensor) -> HessianPart:
        """Return some of the points without their blocks; arguments as in :meth:`at`."""
        return HessianPart(*normalize(z), targets, waiting.sent(numbers, z.device))

    def at(self, z: Tensor, targets: Tensor, numbers: Tensor) -> HessianPoints:
        """Return some of the points with their blocks.

        Args:
            z: Raw outputs, shape (B, D).
            targets: Targets of the points, shape (B, ...).
            numbers: Numbers of the points, as in the first pass, int64, shape (B,).
        """
        part = self.place(z, targets, numbers)
        sums = self.sums_for(part)
        blocks = make_blocks(part.u, part.n, sums, self.loss.distance, self.loss.pd_fix)
        return HessianPoints(part.u, part.n, targets, part.numbers, blocks, sums.totals(part.u))

    def cross(self, rows: HessianPart, columns: HessianPart) -> CrossBlocks:
        """Return the blocks ``H_ij`` between two parts, zero where i = j; with a bank, its points are the columns."""
        if self.bank is None:
            for part in (rows, columns):
                self._check_numbers(part)
        index, theirs = (self.related.index(part.targets, part.numbers).to(part.u.device) for part in (rows, columns))
        compared = Columns(columns.u, theirs, columns.numbers)
        if self.bank is not None:
            compared = replace(compared, positives=False, weight=self.bank.weight)
        block = self.pairs(rows.u, index, rows.numbers, compared)
        return CrossBlocks(rows.u, rows.n, columns.u, columns.n, block.y, block.c)

    def class_weights(self) -> ClassWeights | None:
        """Return the weights of pairs by class; ``None`` if they depend on more than the two classes.

        With a bank and a margin, these are the weights of the positives only.
        """
        return None

    def loss_and_cost(self, totals: Totals) -> tuple[Tensor, Tensor]:
        """Return the value of the loss and its non-negative version, from the totals of all points."""
        return self.loss.loss_and_cost(totals, self.related.attract, self.related.dtype)

    def sums_for(self, part: HessianPart) -> NodeSums:
        """Return the sums over the neighbours of some points of this set."""
        self._check_numbers(part)
        return self.sums(part.u, self.related.index(part.targets, part.numbers), part.numbers)

    def sums(self, u: Tensor, index: Tensor, numbers: Tensor) -> NodeSums:
        """Return the neighbour sums of B points, unit embeddings (B, D), with classes ``index`` (B,) on any device."""
        assert self.points is not None
        there = waiting.sent(index, u.device)
        if self.bank is None:
            return sum_pairs(self.loss, u, [self._met(u, there, numbers, self.points)])
        if self.loss.coupled:
            raise UnsupportedError(
                f"negative_samples: pd_fix={str(self.loss.pd_fix)!r} couples points with each other. Use pd_fix="
                "'psd_parts', 'psd', 'fixed' or 'ggn_fixed', or negative_samples=None, which takes all negatives."
            )
        # In float64: a column of a bank counts many times, and so does its rounding error.
        x = u.detach().double()
        x = x / x.norm(dim=1, keepdim=True)
        met = []
        if self.loss.negative_weight < 1:
            met += [self._met(x, there, numbers, *part) for part in self._same_classes(index)]
        if self.loss.negative_weight:
            met.append(self._met(x, there, numbers, self.bank))
        return sum_pairs(self.loss, x, met, u.dtype, _PAIRS)

    def pairs(self, x: Tensor, index: Tensor, numbers: Tensor, columns: Columns, value: bool = False) -> PairBlock:
        """Return the derivatives between B rows, unit embeddings (B, D) with classes ``index``, and M columns."""
        targets, shares = self.related.relation.targets, self.related.shares.to(x.dtype)
        positive, negative = self.related.relation.relate(targets[index], targets[columns.index])
        itself = numbers.unsqueeze(1) == columns.numbers
        attracts = None if columns.positives is False else positive & ~itself
        repels = None if columns.positives else negative & ~itself
        if repels is not None and columns.weight is not None:
            repels = columns.weight.to(x.dtype)[index].unsqueeze(1) * repels
        # The rules never see a point's pair with itself, where derivatives may be infinite.
        cosine = (x @ columns.u.to(x.dtype).T).masked_fill_(itself, 0)
        return pair_block(self.loss, cosine, attracts, repels, shares[index], shares[columns.index], value)

    def _met(self, x: Tensor, index: Tensor, numbers: Tensor, columns: Columns, rows: Tensor | None = None) -> Met:
        """Return the derivatives of some rows (by default all) with the same columns, computed in blocks on demand."""
        rows = torch.arange(len(x), device="cpu") if rows is None else rows
        there = waiting.sent(rows, x.device)
        if columns.u.dtype != x.dtype:
            wide = columns.u.to(x.dtype)
            columns = replace(columns, u=wide / wide.norm(dim=1, keepdim=True))

        def block(some: slice, value: bool) -> PairBlock:
            here = there[some]
            return self.pairs(x[here], index[here], numbers[here], columns, value)

        return Met(rows, columns.u, block)

    def _same_classes(self, index: Tensor) -> Iterator[tuple[Columns, Tensor]]:
        """Iterate over groups of classes: all points of the group, and the rows with these classes in ``index`` (B,).

        Small classes share a group.
        """
        assert self._by_class is not None
        # The groups depend on the classes, so they are made on the CPU.
        index = index.cpu()
        order = index.argsort(stable=True)
        classes, counts = index[order].unique_consecutive(return_counts=True)
        sizes = self._sizes[classes]
        group = (sizes.cumsum(0) - sizes) // _TOGETHER
        split = group.unique_consecutive(return_counts=True)[1].tolist()
        rows = group.repeat_interleave(counts).unique_consecutive(return_counts=True)[1].tolist()
        starts = self._sizes.cumsum(0) - self._sizes
        for some, here in zip(classes.split(split), order.split(rows), strict=True):
            # The points are sorted by class; this joins the ranges of several classes.
            length = self._sizes[some]
            shift = (starts[some] - (length.cumsum(0) - length)).repeat_interleave(length)
            places = waiting.sent(shift + torch.arange(len(shift), device="cpu"), self._by_class.u.device)
            yield self._by_class.at(places), here.sort().values

    def _check_numbers(self, part: HessianPart) -> None:
        """Refuse rows whose numbers belonged to other points in the first pass: pairs with themselves would count."""
        assert self.points is not None
        known = self.points.numbers
        place = torch.searchsorted(known, part.numbers).clamp(max=len(known) - 1)
        same = (known[place] == part.numbers) & ((self.points.u[place] - part.u).norm(dim=1) <= _SAME)
        wanted, got = "the same data in every pass, in the same order", "other points or another order"
        hint = "Turn shuffling off, or give the loader an attribute numbers."
        waiting.require(same.all(), lambda: InputError("train_loader", wanted, got, hint))


def dataset_hessian(
    loss: PairLoss,
    table: ClassTable | None,
    relation: RelationFunction | None,
    rows: Rows | None,
    bank: Rows | None,
    dtype: torch.dtype,
) -> DatasetHessian:
    """Return the Hessian over all pairs of a data set.

    Args:
        loss: The loss, with the distance and the fix of its curvature.
        table: Numbers and sums of all classes; ``None`` with a relation.
        relation: Callable that decides which pairs are positive and negative; ``None`` for class labels.
        rows: All points by ascending numbers, if they were kept.
        bank: Sampled points that represent all negatives; ``None`` compares with all points.
        dtype: Floating-point type of the outputs.
    """

    def of(some: Rows) -> tuple[Tensor, Tensor, Tensor]:
        u = normalize(some.columns["outputs"])[0]
        numbers = some.numbers.to(u.device)
        return u, related.index(some.columns["targets"].to(u.device), numbers), numbers

    if table is not None:
        related = Related.of_labels(table, loss.normalization, dtype)
    else:
        assert rows is not None
        targets, numbers = rows.columns["targets"], rows.numbers.to(rows.columns["outputs"].device)
        among_all = make_target_relation(targets, len(rows), numbers.device, relation)
        related = Related.of_points(among_all, numbers, loss.normalization, dtype)
    points = None if rows is None else Columns(*of(rows))
    if bank is None or table is None:
        if points is not None and not (table is not None and loss.sums_suffice):
            warn_of_many(*points.u.shape)
        return loss.hessian_over(related, table, points)
    least = min(2, len(table.labels))
    kinds = len(bank.columns["targets"].unique()) if len(bank) else 0
    if kinds < least:
        wanted = f"a sample with points of two of the {len(table.labels)} classes at least"
        hint = (
            "Use a larger number (about 1,000 give all pairs to three digits), or negative_samples=None: all negatives."
        )
        raise InputError("negative_samples", wanted, f"{len(bank)} points of {kinds}", hint)
    return loss.hessian_over(related, table, points, Columns.bank(*of(bank), table.counts))
