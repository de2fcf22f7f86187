"""A negative that the bank may lack, put into the row of an anchor.

A point i outside the bank is a negative of every anchor k of the bank, but the sampled row of k does not contain it:
its share of the softmax of k could exceed one, and its second derivative be negative. So the row of k is given the
point itself, once, in place of as often as it counts in it: with the sum ``Z`` over the row and the addend ``e`` of the
point, ``Z' = Z + x e``. ``x`` is 1 for a point outside the bank, ``1 - w`` for one inside, which counts w times in the
row, and so 0 where all points are in the bank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contrastive_curvature.losses.infonce import InfoNCELoss
from contrastive_curvature.losses.multisimilarity import MultiSimilarityLoss
from contrastive_curvature.losses.supcon import SupConLoss

if TYPE_CHECKING:
    from contrastive_curvature.losses.rows import RowLoss

__all__ = ["joined_statistics"]

_LARGEST = 300.0
"""Exponent whose square is finite in float64."""


def joined_statistics(
    loss: RowLoss, statistics: Tensor, cosine: Tensor, negative: Tensor, missing: Tensor, positives: Tensor
) -> Tensor | None:
    """Statistics of rows that count one more negative.

    Args:
        loss: The loss.
        statistics: Of the rows of A anchors, shape (A, K).
        cosine: Of every anchor with B negatives, each to be put into the row alone, shape (A, B).
        negative: How often each counts, shape (A, B); zero where it is no negative of the anchor.
        missing: How often it lacks in the row, shape (A, B); negative where it is there too often.
        positives: Number of positives of every anchor, shape (A, 1).

    Returns:
        Shape (A, B, K); ``None`` for a loss whose derivatives in a negative do not depend on other negatives, and for
        one that is not known here.
    """
    if isinstance(loss, SupConLoss):
        log_sum, total, _ = statistics.unsqueeze(2).unbind(1)
        logits = cosine / loss.temperature
        joined = log_sum + _growth(logits - log_sum, negative, missing)
        share = torch.where(negative > 0, negative * (logits - joined).exp(), 0.0)
        return torch.stack([joined, total.expand_as(joined), 1 - share], dim=2)
    if isinstance(loss, InfoNCELoss):
        log_sum, miss, spread = statistics.unsqueeze(2).unbind(1)
        growth = _growth(cosine / loss.temperature - log_sum, negative, missing)
        # Positives are taken to be equally far, which they are where there is one: each falls short by the same.
        mean = miss / positives.clamp(min=1)
        bounded = growth.clamp(max=_LARGEST)
        below = 1 + mean * bounded.expm1()
        rise = bounded.exp() / below
        return torch.stack([log_sum + growth, miss * rise, spread * rise / below], dim=2)
    if isinstance(loss, MultiSimilarityLoss):
        far, close = statistics.unsqueeze(2).unbind(1)
        joined = close + _growth(loss.beta * (cosine - loss.base) - close, negative, missing)
        return torch.stack([far.expand_as(joined), joined], dim=2)
    return None


def _growth(over: Tensor, negative: Tensor, missing: Tensor) -> Tensor:
    """``log(Z' / Z)`` from ``log(e / Z)``, all (A, B); zero where nothing is missing."""
    changes = missing != 0
    over = torch.where(changes, over, 0.0)
    more = torch.logaddexp(torch.zeros_like(over), over + missing.clamp(min=0).log())
    # Z' is never less than what the negative itself adds: without rounding, this changes nothing.
    less = torch.maximum((missing.clamp(max=0) * over.clamp(max=0).exp()).clamp(min=-1).log1p(), over + negative.log())
    return torch.where(changes, torch.where(missing > 0, more, less), 0.0)
