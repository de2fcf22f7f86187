"""The derivatives of any pair loss in the cosines, computed in blocks of rows and never stored whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature import waiting
from contrastive_curvature.hessian.derivatives import CosineDerivatives, NodeSums, Totals
from contrastive_curvature.hessian.moments import MomentPart, Moments
from contrastive_curvature.losses.weighting import Shares, count_shares, pair_totals, weigh_pairs
from contrastive_curvature.pairs.relation import LabelRelation, Relation, row_ranges
from contrastive_curvature.progress import LongRunWarning

if TYPE_CHECKING:
    from contrastive_curvature.losses.base import PairLoss


_MANY_PRODUCTS = 10**12
"""Products of numbers that take minutes on one core."""

_HELD = 2**23
"""Pairs of the points of a batch whose second derivatives are kept instead of being computed again."""


class PairBlock(NamedTuple):
    """Derivatives of a block of pairs, each of the shape of the cosines.

    Args:
        y: ``-dL/ds`` of the pairs that the fix keeps.
        c: Second derivatives; ``None`` for a linear loss.
        whole: ``-dL/ds`` of all pairs, if the loss's value needs them and the fix omits some.
        cosine: Cosines of the pairs.
        value: The value of the loss, if requested.
    """

    y: Tensor
    c: Tensor | None
    whole: Tensor | None
    cosine: Tensor
    value: Tensor


def pair_block(
    loss: PairLoss,
    cosine: Tensor,
    positive: Tensor | None,
    negative: Tensor | None,
    rows: Shares,
    columns: Shares,
    value: bool = False,
) -> PairBlock:
    """Compute the derivatives of pairs from their cosines and multiplicities; ``None`` for zero."""
    nothing = cosine.new_zeros(())
    attract, repel = weigh_pairs(loss.negative_weight, positive, negative, rows, columns)
    first, second = loss._checked_terms(cosine, attract, repel)
    whole = -first if loss.from_sums and loss.pd_fix.attracting_only else None
    if loss.pd_fix.attracting_only:
        first = loss._checked_terms(cosine, attract, nothing).first
    elif loss.pd_fix.second_only:
        first = torch.zeros_like(first)
    number = loss._checked_value(cosine, attract, repel) if value else nothing
    return PairBlock(-first, second, whole, cosine, number)


class Met(NamedTuple):
    """Some rows and their shared columns.

    Args:
        rows: Numbers of the rows, ascending, shape (P,); on the CPU nothing waits to cut them.
        others: Unit embeddings of the columns, shape (M, D).
        block: Function that returns the derivatives of a range of these rows, with the value if its second argument is
            true.
    """

    rows: Tensor
    others: Tensor
    block: Callable[[slice, bool], PairBlock]


def sum_pairs(
    loss: PairLoss, x: Tensor, met: Sequence[Met], dtype: torch.dtype | None = None, entries: int | None = None
) -> NodeSums:
    """Return the sums over the neighbours of points.

    Args:
        loss: The loss.
        x: Unit embeddings of the points, shape (B, D).
        met: The columns that the points are compared with.
        dtype: Dtype of the moments; by default the dtype of ``x``.
        entries: Number of pairs whose derivatives are computed at once.
    """
    # In float64 if the value is a difference of sums.
    wide = torch.float64 if loss.from_sums else x.dtype
    kept, whole = ((x.new_zeros(len(x), dtype=wide), x.new_zeros(x.shape, dtype=wide)) for _ in range(2))
    value, bound = x.new_zeros((), dtype=torch.float64), x.new_zeros(len(x))
    holds = sum(len(rows) * len(others) for rows, others, _ in met) <= _HELD
    parts = []
    for rows, others, block in met:
        held: list[tuple[Tensor, Tensor]] = []
        summands, there = others.to(wide), waiting.sent(rows, x.device)
        for some in row_ranges(len(rows), len(others), entries):
            pairs, here = block(some, not loss.from_sums), there[some]
            value += pairs.value.double() / 2
            for y, (degree, neighbors) in ((pairs.y, kept), (pairs.whole, whole)):
                if y is not None and not loss.pd_fix.second_only:
                    degree[here] += y.to(wide).sum(1)
                    neighbors[here] += y.to(wide) @ summands
            if pairs.c is not None:
                bound[here] += torch.linalg.vector_norm(pairs.c, ord=1, dim=1)
                if holds:
                    held.append((pairs.c, pairs.cosine))
        parts.append(MomentPart(rows, partial(_seconds, block, held, len(others), entries), others))
    moments = None
    if not loss.linear:
        moments = Moments(parts, x.new_zeros(0), x.new_zeros(0, *x.shape), bound, dtype)
    # The repelling pairs are left out of the curvature, but not of the loss.
    partial_sums = loss.from_sums and loss.pd_fix.attracting_only
    counted = NodeSums(*whole, None, value).totals(x) if partial_sums else None
    return NodeSums(*kept, moments, value, counted).checked(type(loss).__name__)


def _seconds(
    block: Callable[[slice, bool], PairBlock],
    held: list[tuple[Tensor, Tensor]],
    width: int,
    entries: int | None,
    start: int,
    stop: int,
) -> tuple[Tensor, Tensor]:
    """Return second derivatives and cosines of rows ``start..stop``."""
    if held:
        held[:] = [_joined(held)]
        return held[0][0][start:stop], held[0][1][start:stop]
    blocks = (
        block(slice(start + some.start, start + some.stop), False) for some in row_ranges(stop - start, width, entries)
    )
    return _joined([(cast("Tensor", pairs.c), pairs.cosine) for pairs in blocks])


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    seconds, cosines = zip(*parts, strict=True)
    return torch.cat(seconds), torch.cat(cosines)


def warn_of_many(n: int, dim: int) -> None:
    """Warn if all pairs of n points take minutes or more."""
    if n**2 * dim >= _MANY_PRODUCTS:
        warnings.warn(
            f"Forming the {n * (n - 1) / 2:.3g} pairs of {n} points takes a time of order N^2. "
            "Faster: fewer points; margin=None, which needs sums over classes only (with class labels); or a GPU.",
            LongRunWarning,
            stacklevel=3,
        )


class PairDerivatives(CosineDerivatives):
    """``y`` and ``c`` (N, N) of a pair loss: symmetric, with a zero diagonal.

    Args:
        loss: The loss; with the fix ``positive``, ``y`` keeps only the positive pairs (Eq. 109); with ``ggn``, none.
        relation: Which pairs are positive and negative.
        u: Unit embeddings, shape (N, D).
        shares: Shares of the points; ``None`` counts the pairs of ``relation``.
    """

    def __init__(self, loss: PairLoss, relation: Relation, u: Tensor, shares: Shares | None = None) -> None:
        self.loss, self.relation, self.u = loss, relation, u
        self.n = self.anchors = relation.n
        counts = relation.counts()
        self.shares = shares or count_shares(*counts, loss.normalization, u.dtype, pair_totals(*counts))
        self._attract = (self.shares.positive.double() * counts[0]).sum()
        if not (loss.sums_suffice and isinstance(relation, LabelRelation)):
            warn_of_many(*u.shape)

    @override
    def node_sums(self) -> NodeSums:
        rows = torch.arange(self.n, device="cpu")
        met = Met(rows, self.u, lambda some, value: self._rows(some.start, some.stop, value=value))
        return sum_pairs(self.loss, self.u, [met])

    @override
    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        block = self._rows(start, stop, columns)
        return block.y, block.c

    @override
    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        totals = totals or self.node_sums().totals(self.u)
        return self.loss.loss_and_cost(totals, self._attract, self.u.dtype)

    def _rows(self, start: int, stop: int, columns: slice = slice(None), value: bool = False) -> PairBlock:
        positive, negative = self.relation.rows(start, stop, columns)
        cosine = self.u[start:stop] @ self.u[columns].T
        # The rules never see a point's pair with itself, where derivatives may be infinite.
        cosine.diagonal(start - columns.indices(self.n)[0]).zero_()
        shares = self.shares[start:stop], self.shares[columns]
        return pair_block(self.loss, cosine, positive, negative, *shares, value)
