"""The supervised contrastive loss."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.arguments import check_number
from contrastive_curvature.losses.rows import RowLoss, RowTerms
from contrastive_curvature.options import Distance, PDFix

__all__ = ["SupConLoss"]


class SupConLoss(RowLoss):
    r"""Supervised contrastive loss: a softmax over all candidates, with the positives as equal targets.

    With the temperature ``tau``, the positives ``P(i)`` and all candidates ``A(i)`` of anchor i, over anchors that have
    a positive:

    .. math::
        L = \operatorname{mean}_i \; - \frac{1}{|P(i)|} \sum_{p \in P(i)}
            \log \frac{\exp(s_{ip} / \tau)}{\sum_{a \in A(i)} \exp(s_{ia} / \tau)}

    Anchors without a positive are left out of the mean, as there is nothing to tell them apart from.

    Args:
        temperature: ``tau``, positive.
        reduction: See :class:`~contrastive_curvature.losses.rows.RowLoss`; the terms are the anchors.
        directions: See :class:`~contrastive_curvature.losses.rows.RowLoss`.
        distance: See :class:`~contrastive_curvature.options.Distance`.
        pd_fix: See :class:`~contrastive_curvature.options.PDFix`.

    Raises:
        InputError: An option is unknown or out of range.

    Source: Khosla et al., Supervised Contrastive Learning, 2020, Eq. 2.
    """

    root_signs = (-1,)
    shift_invariant = True

    def __init__(
        self,
        temperature: float = 0.1,
        reduction: str = "mean",
        directions: str = "both",
        *,
        distance: Distance | str = Distance.ARCCOS,
        pd_fix: PDFix | str = PDFix.GGN,
    ) -> None:
        super().__init__(reduction, directions, distance=distance, pd_fix=pd_fix)
        self.temperature = check_number("temperature", temperature, positive=True)

    def _counts(self, positive: Tensor, negative: Tensor) -> Tensor:
        return (positive > 0).any(1).to(positive.dtype)

    def _value(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        logits = cosine / self.temperature
        target = positive / positive.sum(1, keepdim=True)
        return _log_sum(logits, positive, negative) - (target * logits).sum(1)

    def _statistics(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        total = positive.sum(1)
        return torch.stack([_log_sum(cosine / self.temperature, positive, negative), total], dim=1)

    def _terms(self, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor) -> RowTerms:
        weight = _candidate_weight(positive, negative)
        log_sum, total = statistics[:, :1], statistics[:, 1:]
        p = torch.where(weight > 0, weight * (cosine / self.temperature - log_sum).exp(), 0.0)
        first = (p - positive / total) / self.temperature
        return RowTerms(first, p / self.temperature**2, (p / self.temperature,))


def _candidate_weight(positive: Tensor, negative: Tensor) -> Tensor:
    """How often a candidate stands in the denominator: a positive once, a negative as often as it counts."""
    return torch.where(positive > 0, 1.0, negative)


def _log_sum(logits: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """``log sum_j w_j exp(logit_j)`` over the candidates, shape (B,)."""
    return (logits + _candidate_weight(positive, negative).log()).logsumexp(1)
