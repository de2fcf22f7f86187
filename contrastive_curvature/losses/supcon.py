"""The supervised contrastive loss."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.losses.row_loss import RowLoss, RowTerms, check_temperature, weighted_logsumexp
from contrastive_curvature.options import Distance, PDFix


class SupConLoss(RowLoss):
    r"""Supervised contrastive loss: a softmax over all candidates, with the positives as equal targets.

    With the temperature ``tau``, the positives ``P(i)`` and all candidates ``A(i)`` of anchor i, over anchors that have
    a positive:

    .. math::
        L = \operatorname{mean}_i \; - \frac{1}{|P(i)|} \sum_{p \in P(i)}
            \log \frac{\exp(s_{ip} / \tau)}{\sum_{a \in A(i)} \exp(s_{ia} / \tau)}

    Anchors without a positive are left out of the mean. A positive listed several times has a larger share of the
    targets, but only one term in the denominator; a negative has one term there each time it counts.

    ``SupConLoss`` of pytorch-metric-learning differs in two cases: it is zero for batches without negatives, and leaves
    anchors with zero loss out of the mean. If every anchor has one positive, the loss equals
    :class:`~contrastive_curvature.losses.infonce.InfoNCELoss`, whose cross terms keep more digits in single precision
    when the softmax is sure of all positives.

    Args:
        temperature: ``tau``, positive.
        reduction: See :class:`~contrastive_curvature.losses.row_loss.RowLoss`; the terms are the anchors.
        directions: See :class:`~contrastive_curvature.losses.row_loss.RowLoss`.
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
        temperature: float | Tensor = 0.1,
        reduction: str = "mean",
        directions: str = "both",
        *,
        distance: Distance | str = Distance.ARCCOS,
        pd_fix: PDFix | str = PDFix.PSD_PARTS,
    ) -> None:
        super().__init__(reduction, directions, distance=distance, pd_fix=pd_fix)
        self.temperature = check_temperature(temperature)

    def _counts(self, positive: Tensor, negative: Tensor) -> Tensor:
        return (positive > 0).any(1).to(positive.dtype)

    def _value(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        logits = cosine / self.temperature
        target = positive / positive.sum(1, keepdim=True)
        return weighted_logsumexp(logits, _candidate_weight(positive, negative)) - (target * logits).sum(1)

    def _cost(self, value: Tensor, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        # The minimum is the entropy of the targets; a trained encoder may exceed it by less than a rounding error. So
        # the difference is computed directly: with d = logit - log(target), minus its mean over the targets, the
        # difference is log(1 + sum_p target_p (exp(d_p) - 1 - d_p) + sum_n exp(d_n)).
        row, column = positive.nonzero(as_tuple=True)
        sums = positive.new_zeros(len(positive), dtype=torch.float64)
        target = positive[row, column].double() / positive.double().sum(1)[row]
        d = cosine[row, column].double() / self.temperature - target.log()
        mean = sums.index_add(0, row, target * d)
        d = d - mean[row]
        near = sums.index_add(0, row, target * (d.expm1() - d))
        others = (negative > 0) & (positive == 0)
        far = torch.where(others, cosine / self.temperature - mean.to(cosine).unsqueeze(1), -torch.inf).exp() * negative
        cost = (near + far.sum(1)).log1p()
        least = sums.index_add(0, row, torch.special.entr(target))
        return torch.where(cost.isfinite(), cost, value.double() - least)

    def _statistics(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        log_sum = weighted_logsumexp(cosine / self.temperature, _candidate_weight(positive, negative))
        p = self._shares(cosine, positive, negative, log_sum.unsqueeze(1))
        # The sum over the candidates, without a candidate that has more than half.
        rest = torch.where(p > 0.5, 0.0, p).sum(1)
        return torch.stack([log_sum, positive.sum(1), rest], dim=1)

    def _terms(self, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor) -> RowTerms:
        log_sum, total, rest = statistics.unsqueeze(2).unbind(1)
        p, target = self._shares(cosine, positive, negative, log_sum), positive / total
        # If a positive has nearly the whole share p, 1 - p has lost its digits; the sum of the other shares has not.
        first = torch.where(p > 0.5, (1 - target) - rest, p - target) / self.temperature
        return RowTerms(first, p / self.temperature**2, (p / self.temperature,))

    def _shares(self, cosine: Tensor, positive: Tensor, negative: Tensor, log_sum: Tensor) -> Tensor:
        """Return the softmax of an anchor's candidates."""
        weight = _candidate_weight(positive, negative)
        return torch.where(weight > 0, weight * (cosine / self.temperature - log_sum).exp(), 0.0)


def _candidate_weight(positive: Tensor, negative: Tensor) -> Tensor:
    """Return how often a candidate is in the denominator: a positive once, a negative as often as it counts."""
    return torch.where(positive > 0, 1.0, negative)
