"""What a pair counts before the loss is asked: the bias correction (paper, Eq. 10) and the normalisation.

A listed pair {i, j} counts ``(1 - w_n) m+_ij (r+_i + r+_j) / 2`` as a positive and ``w_n m-_ij (r-_i + r-_j) / 2`` as a
negative, with the multiplicities ``m`` of the relation and, at every point, a share ``r`` that carries the
normalisation: 1 for ``sum``, one over the number of pairs of the type for ``type`` (Eq. 23), one over the number at the
point for ``anchor`` (Eq. 119). Counts run over all listed pairs, also over negatives that do not enter the loss. Where
only some of the pairs are formed, their shares stand for all (:meth:`Shares.standing_for`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError
from contrastive_curvature.options import Normalization
from contrastive_curvature.pairs.edges import EdgeRelation
from contrastive_curvature.pairs.relation import LabelRelation, Relation, TargetRelation


@dataclass(frozen=True)
class Shares:
    """What one listing at a point weighs before the factors.

    Args:
        positive: ``r+``, shape (N,).
        negative: ``r-``, shape (N,).
    """

    positive: Tensor
    negative: Tensor

    def __getitem__(self, rows: slice | Tensor) -> Shares:
        """Return the shares of some of the points."""
        return Shares(self.positive[rows], self.negative[rows])

    def to(self, dtype: torch.dtype) -> Shares:
        """Return the same in another floating-point type."""
        return Shares(self.positive.to(dtype), self.negative.to(dtype))

    def standing_for(self, every: Sequence[float], some: Sequence[float]) -> Shares:
        """Return the shares with which ``some`` of the positive and negative pairs stand for ``every`` one."""
        positive, negative = (a / b if b else 0.0 for a, b in zip(every, some, strict=True))
        return Shares(positive * self.positive, negative * self.negative)


def count_shares(
    positive: Tensor, negative: Tensor, normalization: Normalization, dtype: torch.dtype, totals: Sequence[float]
) -> Shares:
    """Turn counts of positives and negatives at every point (N,), and in the whole set, into shares."""

    def share(count: Tensor, total: float) -> Tensor:
        if normalization is Normalization.SUM:
            return torch.ones_like(count, dtype=dtype)
        if normalization is Normalization.TYPE:
            return torch.full_like(count, 1 / total if total else 0.0, dtype=dtype)
        return torch.where(count > 0, 1 / count.clamp(min=1).to(dtype), 0.0)

    return Shares(share(positive, totals[0]), share(negative, totals[1]))


class ClassShares:
    """Which points are positives of each other, and their shares, by class label.

    Args:
        classes: Class labels, ascending, shape (C,).
        counts: Number of points of every class, shape (C,).
        shares: Of a point of every class, float64.
        dtype: Floating-point type of the embeddings.

    Attributes:
        n: Number of all points.
        totals: Number of positive and of negative pairs.
        attract: Shares of the positives, summed over all of them and all points, float64.
    """

    def __init__(self, classes: Tensor, counts: Tensor, shares: Shares, dtype: torch.dtype) -> None:
        self.classes, self.counts, self.shares, self.dtype = classes, counts, shares.to(torch.float64), dtype
        positive, _, self.totals = class_pairs(counts)
        self.n = int(counts.sum())
        self.attract = (self.shares.positive * positive * counts).sum()

    @classmethod
    def of_counts(
        cls, classes: Tensor, counts: Tensor, normalization: Normalization, dtype: torch.dtype
    ) -> ClassShares:
        """Make the shares from the number of points (C,) of every class, ascending labels (C,)."""
        positive, negative, totals = class_pairs(counts)
        return cls(classes, counts, count_shares(positive, negative, normalization, torch.float64, totals), dtype)

    def index(self, targets: Tensor, numbers: Tensor | None = None) -> Tensor:
        """Return the class of every point, shape (B,), by its label."""
        del numbers
        return find_classes(self.classes, targets)

    def relate(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return positives and negatives, each (A, B), of points of classes (A,) and (B,)."""
        same = rows.unsqueeze(1) == columns
        return same, ~same

    def relation_of(self, targets: Tensor) -> Relation:
        """Return the relation of some points with labels (B,) among themselves."""
        return LabelRelation(targets)


class PointShares:
    """The same for a relation that is no equality of labels: every point is a class by itself.

    Args:
        relation: Of all N points by ascending numbers.
        numbers: Of these points, shape (N,).
        normalization: Of the loss.
        dtype: Floating-point type of the embeddings.
    """

    def __init__(
        self, relation: TargetRelation, numbers: Tensor, normalization: Normalization, dtype: torch.dtype
    ) -> None:
        self.relation, self.numbers, self.dtype, self.n = relation, numbers, dtype, relation.n
        counts = relation.counts()
        self.totals = pair_totals(*counts)
        self.shares = count_shares(*counts, normalization, torch.float64, self.totals)
        self.attract = (self.shares.positive * counts[0]).sum()

    def index(self, targets: Tensor, numbers: Tensor) -> Tensor:
        """Return the place of every point among all, shape (B,), by its number."""
        place = torch.searchsorted(self.numbers, numbers)
        if not torch.equal(self.relation.targets[place], targets):
            raise InputError("train_loader", "the same data in every pass", "other targets in the second")
        return place

    def relate(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`ClassShares.relate`."""
        targets = self.relation.targets
        return self.relation.relate(targets[rows], targets[columns])

    def relation_of(self, targets: Tensor) -> Relation:
        """See :meth:`ClassShares.relation_of`."""
        return self.relation.of(targets)


def find_classes(classes: Tensor, labels: Tensor) -> Tensor:
    """Return the index of every label (B,) among the ascending class labels (C,); all occur in the first pass."""
    index = torch.searchsorted(classes, labels.contiguous()).clamp(max=max(0, len(classes) - 1))
    unknown = classes[index] != labels if len(classes) else torch.ones_like(labels, dtype=torch.bool)
    if bool(unknown.any()):
        came = f"the new labels {labels[unknown].unique()[:5].tolist()} in the second"
        raise InputError("train_loader", "the same data in every pass", came)
    return index


def class_pairs(counts: Tensor) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """Return positive and negative pairs at a point of every class (C,), and in the whole set, from sizes (C,)."""
    positive, negative = counts - 1, counts.sum() - counts
    # As Python's whole numbers, which do not overflow.
    every = counts.tolist()
    n, same = sum(every), sum(count * (count - 1) for count in every)
    return positive, negative, (same / 2, (n * (n - 1) - same) / 2)


def weigh_pairs(
    negative_weight: float, positive: Tensor | None, negative: Tensor | None, rows: Shares, columns: Shares
) -> tuple[Tensor, Tensor]:
    """Return how much each pair counts as a positive and as a negative; one zero for no pairs or a factor of zero."""

    def weight(factor: float, a: Tensor, b: Tensor, count: Tensor | None) -> Tensor:
        if not factor or count is None:
            return a.new_zeros(())
        share = (a.unsqueeze(1) + b) / 2 if count.ndim == 2 else (a + b) / 2
        return (factor * share) * count

    attract = weight(1 - negative_weight, rows.positive, columns.positive, positive)
    return attract, weight(negative_weight, rows.negative, columns.negative, negative)


def lone_shares(relation: Relation, normalization: Normalization, dtype: torch.dtype, n_data: int) -> Shares:
    """Return the shares of a batch's pairs, where nothing else is known of the data set of ``n_data`` points.

    For ``anchor``, the points that have a positive in the batch stand for those that have none, and negatives alike;
    but a miner lists all pairs that are to count, and a batch of all points has them. For ``type``, batches count by
    their number of points. For ``sum``, there are N (N - 1) / (B (B - 1)) times the pairs of the batch.
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
    """Return the number of positive and of negative pairs, from their numbers at every point, both (N,)."""
    return float(positive.sum()) / 2, float(negative.sum()) / 2
