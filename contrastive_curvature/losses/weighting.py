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

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.options import Normalization
from contrastive_curvature.pairs.edges import EdgeRelation
from contrastive_curvature.pairs.relation import Relation


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
    """Shares by class label: all points of a class have equal counts.

    Args:
        labels: Class labels of the N points, shape (N,).
        shares: Of the same points.
    """

    def __init__(self, labels: Tensor, shares: Shares) -> None:
        self.classes, inverse = labels.unique(return_inverse=True)
        first = torch.zeros_like(self.classes).scatter_(0, inverse, torch.arange(len(labels), device=labels.device))
        self.shares = shares[first]

    @classmethod
    def of_counts(
        cls, classes: Tensor, counts: Tensor, normalization: Normalization, dtype: torch.dtype
    ) -> ClassShares:
        """Make the shares from the number of points (C,) of every class, ascending labels (C,)."""
        positive, negative, totals = class_pairs(counts)
        return cls(classes, count_shares(positive, negative, normalization, dtype, totals))

    def find(self, labels: Tensor) -> Tensor:
        """Return the index of the class of every label, shape (B,)."""
        return find_classes(self.classes, labels)

    def of(self, labels: Tensor) -> Shares:
        """Return the shares of points with these labels."""
        return self.shares[self.find(labels)]


def find_classes(classes: Tensor, labels: Tensor) -> Tensor:
    """Return the index of every label (B,) among the ascending class labels (C,); all occur in the first pass."""
    index = torch.searchsorted(classes, labels.contiguous()).clamp(max=max(0, len(classes) - 1))
    unknown = classes[index] != labels if len(classes) else torch.ones_like(labels, dtype=torch.bool)
    if bool(unknown.any()):
        came = f"the new labels {labels[unknown].unique()[:5].tolist()} in the second"
        raise InputError(expected("train_loader", "the same data in every pass", came))
    return index


def class_pairs(counts: Tensor) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """Return positive and negative pairs at a point of every class (C,), and in the whole set, from sizes (C,)."""
    positive, negative = counts - 1, counts.sum() - counts
    # As Python's whole numbers, which do not overflow.
    every = counts.tolist()
    n, same = sum(every), sum(count * (count - 1) for count in every)
    return positive, negative, (same / 2, (n * (n - 1) - same) / 2)


def weigh_pairs(
    negative_weight: float, positive: Tensor, negative: Tensor, rows: Shares, columns: Shares
) -> tuple[Tensor, Tensor]:
    """Return how much each pair counts as a positive and as a negative; one zero where the factor is zero."""

    def weight(factor: float, a: Tensor, b: Tensor, count: Tensor) -> Tensor:
        if not factor:
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
