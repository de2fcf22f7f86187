"""The weight ``y_ij`` of an unordered pair: factor, normalisation, margin.

``y_ij = (1 - w_n) m+_ij (r+_i + r+_j) / 2  -  w_n m-_ij (r-_i + r-_j) / 2  [|u_i - u_j| < margin]``

with the multiplicities ``m`` of the relation and, at every point, a share ``r`` that carries the normalisation: 1 for
``sum``, one over the number of pairs of the type for ``type`` (paper, Eq. 23), one over the number at the point for
``anchor`` (Eq. 119). Counts run over all listed pairs, also over negatives outside the margin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.options import LARGEST_DISTANCE, CurvatureOptions, Normalization, PDFix

__all__ = ["PairFactors", "Shares", "count_shares"]


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
        """Shares of some of the points."""
        return Shares(self.positive[rows], self.negative[rows])


def count_shares(
    positive: Tensor, negative: Tensor, normalization: Normalization, dtype: torch.dtype, totals: tuple[float, float]
) -> Shares:
    """Turn counts into shares.

    Args:
        positive: Number of positive listings at each point, shape (N,).
        negative: Number of negative listings at each point, shape (N,).
        normalization: See :class:`~contrastive_curvature.options.Normalization`.
        dtype: Floating-point type of the shares.
        totals: Number of positive and of negative listings in the whole set (each unordered listing once).

    Returns:
        The shares; a point or a type without any listing gets zero.
    """

    def share(count: Tensor, total: float) -> Tensor:
        if normalization is Normalization.SUM:
            return torch.ones_like(count, dtype=dtype)
        if normalization is Normalization.TYPE:
            return torch.full_like(count, 1 / total if total else 0.0, dtype=dtype)
        return torch.where(count > 0, 1 / count.clamp(min=1).to(dtype), 0.0)

    return Shares(share(positive, totals[0]), share(negative, totals[1]))


@dataclass(frozen=True)
class PairFactors:
    """The two factors in front of the shares, and the margin as a threshold on the cosine.

    Args:
        positive: Factor of the attracting pairs.
        negative: Factor of the repelling pairs, as a non-negative number.
        cosine: A negative counts where ``u_i . u_j`` exceeds this; ``None`` lets all count.
        margin: The margin itself, for the value of the loss.
    """

    positive: float
    negative: float
    cosine: float | None
    margin: float | None

    @classmethod
    def from_options(cls, options: CurvatureOptions, scale: tuple[float, float] = (1.0, 1.0)) -> PairFactors:
        """Combine Eq. 10, the ``positive`` fix (Eq. 109) and a batch-to-data-set scale (Proposition B.1).

        Args:
            options: The curvature options.
            scale: Extra factor of positives and of negatives.

        Returns:
            The factors.
        """
        weight = options.negative_weight
        negative = 0.0 if options.pd_fix is PDFix.POSITIVE else weight * scale[1]
        masks = options.margin is not None and options.margin < LARGEST_DISTANCE
        cosine = 1 - options.margin**2 / 2 if masks else None  # type: ignore[operator]
        return cls((1 - weight) * scale[0], negative, cosine, options.margin)

    def weigh(self, positive: Tensor, negative: Tensor, cosine: Tensor, rows: Shares, columns: Shares) -> Tensor:
        """Signed weights of a block of pairs.

        Args:
            positive: Multiplicities (A, B) or, for listed pairs, (K,).
            negative: The same for the negatives.
            cosine: ``u_i . u_j``, of the same shape.
            rows: Shares that broadcast from the left: (A,) or (K,).
            columns: Shares of the other side: (B,) or (K,).

        Returns:
            ``y``, of the same shape.
        """

        def mean_share(a: Tensor, b: Tensor) -> Tensor:
            return (a.unsqueeze(1) + b) / 2 if positive.ndim == 2 else (a + b) / 2

        y = (self.positive * mean_share(rows.positive, columns.positive)) * positive
        if self.negative:
            repel = (self.negative * mean_share(rows.negative, columns.negative)) * negative
            y = y - (repel if self.cosine is None else repel * (cosine > self.cosine))
        return y
