"""The weight of a pair, the same for every pair loss: the bias correction (paper, Eq. 10) and the normalisation.

A listed pair {i, j} counts ``(1 - w_n) m+_ij (r+_i + r+_j) / 2`` as a positive and ``w_n m-_ij (r-_i + r-_j) / 2`` as a
negative, with the multiplicities ``m`` of the relation and, at every point, a share ``r`` for the normalisation: 1 for
``sum``; for ``type`` (Eq. 23) one over the number of pairs of this type; for ``anchor`` (Eq. 119) one over the number
of such pairs at the point. Counts include all listed pairs, also negatives that do not enter the loss. If only some
pairs are formed, their shares are scaled to represent all (:meth:`Shares.standing_for`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import cast

import torch
from torch import Tensor

from contrastive_curvature import waiting
from contrastive_curvature.errors import InputError
from contrastive_curvature.losses.class_table import ClassTable
from contrastive_curvature.options import Normalization
from contrastive_curvature.pairs.edges import EdgeRelation
from contrastive_curvature.pairs.relation import LabelRelation, Relation, TargetRelation


@dataclass(frozen=True)
class Shares:
    """Weight of one listed pair at a point, without the factors.

    Args:
        positive: ``r+``, shape (N,).
        negative: ``r-``, shape (N,).
    """

    positive: Tensor
    negative: Tensor

    def __getitem__(self, rows: slice | Tensor) -> Shares:
        """Return the shares of some of the points."""
        return Shares(self.positive[rows], self.negative[rows])

    def to(self, like: Tensor | torch.dtype) -> Shares:
        """Convert the shares to another floating-point type, or to the type and device of a tensor."""
        return Shares(self.positive.to(like), self.negative.to(like))

    def standing_for(self, every: Sequence[float], some: Sequence[float]) -> Shares:
        """Scale the shares so that ``some`` positive and negative pairs represent ``every`` pair."""
        positive, negative = (a / b if b else 0.0 for a, b in zip(every, some, strict=True))
        return Shares(positive * self.positive, negative * self.negative)


def count_shares(
    positive: Tensor, negative: Tensor, normalization: Normalization, dtype: torch.dtype, totals: Sequence[float]
) -> Shares:
    """Turn counts of positives and negatives, per point (N,) and in total, into shares."""

    def share(count: Tensor, total: float) -> Tensor:
        if normalization is Normalization.SUM:
            return torch.ones_like(count, dtype=dtype)
        if normalization is Normalization.TYPE:
            return torch.full_like(count, 1 / total if total else 0.0, dtype=dtype)
        return torch.where(count > 0, 1 / count.clamp(min=1).to(dtype), 0.0)

    return Shares(share(positive, totals[0]), share(negative, totals[1]))


@dataclass(frozen=True)
class Related:
    """Relation and shares of the points of a data set, by class.

    All points of a class are treated alike. If the relation is not equality of labels, every point is a class by
    itself.

    Args:
        relation: Relation between the C classes; its targets are ascending labels, or the targets of all points.
        shares: Shares of a point in each class, float64, shape (C,).
        totals: Number of positive and of negative pairs.
        attract: Shares of the positives, summed over all positives of all points, float64.
        n: Number of all points.
        dtype: Floating-point type of the embeddings.
        numbers: Numbers of all points, ascending, if every point is a class; ``None`` for labels.
    """

    relation: TargetRelation
    shares: Shares
    totals: tuple[float, float]
    attract: Tensor
    n: int
    dtype: torch.dtype
    numbers: Tensor | None = None

    @classmethod
    def of_labels(
        cls, table: ClassTable, normalization: Normalization, dtype: torch.dtype, shares: Shares | None = None
    ) -> Related:
        """Relate points by class labels; ``shares`` of a point in each class, if already known."""
        positive, negative, totals = class_pairs(table.counts)
        shares = shares or count_shares(positive, negative, normalization, torch.float64, totals)
        shares = shares.to(torch.float64)
        attract = (shares.positive * positive * table.counts).sum()
        return cls(LabelRelation(table.labels), shares, totals, attract, int(table.counts.sum()), dtype)

    @classmethod
    def of_points(
        cls, relation: TargetRelation, numbers: Tensor, normalization: Normalization, dtype: torch.dtype
    ) -> Related:
        """Relate points with ascending numbers (N,) by any relation."""
        counts = relation.counts()
        totals = pair_totals(*counts)
        shares = count_shares(*counts, normalization, torch.float64, totals)
        return cls(relation, shares, totals, (shares.positive * counts[0]).sum(), relation.n, dtype, numbers)

    def index(self, targets: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Return the class of every point, shape (B,), from its label or its number; on the CPU if the labels are."""
        by_label = self.numbers is None or numbers is None
        known = self.relation.targets
        if by_label and targets.device.type == "cpu":
            known = self._labels_on_cpu
        else:
            targets = waiting.sent(targets, known.device)
        keys, sought = (known, targets) if by_label else (cast("Tensor", self.numbers), cast("Tensor", numbers))
        index = torch.searchsorted(keys, sought.contiguous()).clamp(max=max(0, len(keys) - 1))
        other = (known[index] != targets).unsqueeze(1).flatten(1).any(1)
        waiting.require(~other.any(), partial(_other_targets, targets, other))
        return index

    @cached_property
    def _labels_on_cpu(self) -> Tensor:
        return self.relation.targets.cpu()


def _other_targets(targets: Tensor, other: Tensor) -> InputError:
    got = f"other targets in the second, {targets[other][:5].tolist()}"
    return InputError("train_loader", "the same data in every pass", got)


def class_pairs(counts: Tensor) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """Count the positive and negative pairs, at a point of each class (C,) and in total, from class sizes (C,)."""
    positive, negative = counts - 1, counts.sum() - counts
    # Python integers do not overflow.
    every = counts.tolist()
    n, same = sum(every), sum(count * (count - 1) for count in every)
    return positive, negative, (same / 2, (n * (n - 1) - same) / 2)


def weigh_pairs(
    negative_weight: float, positive: Tensor | None, negative: Tensor | None, rows: Shares, columns: Shares
) -> tuple[Tensor, Tensor]:
    """Return each pair's weight as a positive and as a negative; a single zero for no pairs or a zero factor."""

    def weight(factor: float, a: Tensor, b: Tensor, count: Tensor | None) -> Tensor:
        if not factor or count is None:
            return a.new_zeros(())
        # The factor goes to the points, because passes over all pairs take most of the time of a product.
        half = factor / 2
        return (half * a.unsqueeze(1) + half * b if count.ndim == 2 else half * (a + b)) * count

    attract = weight(1 - negative_weight, rows.positive, columns.positive, positive)
    return attract, weight(negative_weight, rows.negative, columns.negative, negative)


def lone_shares(relation: Relation, normalization: Normalization, dtype: torch.dtype, n_data: int) -> Shares:
    """Return the shares of a batch's pairs, scaled to an otherwise unknown data set of ``n_data`` points.

    For ``anchor``, the points with a positive in the batch also represent the points without one, and likewise for
    negatives. There is no such scaling if a miner lists the pairs or the batch has all points. For ``type``, batches
    count by their number of points. For ``sum``, the data set has N (N - 1) / (B (B - 1)) times as many pairs as the
    batch.
    """
    counts = relation.counts()
    shares = count_shares(*counts, normalization, dtype, pair_totals(*counts))
    if normalization is Normalization.SUM:
        return shares.standing_for([n_data - 1] * 2, [max(relation.n - 1, 1)] * 2)
    if normalization is Normalization.TYPE:
        return shares.standing_for([relation.n] * 2, [n_data] * 2)
    if isinstance(relation, EdgeRelation) or relation.n == n_data:
        return shares
    return shares.standing_for([relation.n] * 2, [int((count > 0).sum()) for count in counts])


def pair_totals(positive: Tensor, negative: Tensor) -> tuple[float, float]:
    """Return the numbers of positive and negative pairs, from their numbers at every point, both (N,)."""
    return float(positive.sum()) / 2, float(negative.sum()) / 2
