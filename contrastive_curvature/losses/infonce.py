"""The softmax loss of single positive pairs: InfoNCE, NT-Xent, multiple negatives ranking, CLIP."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError
from contrastive_curvature.losses.row_loss import RowLoss, RowTerms, check_temperature, weighted_logsumexp
from contrastive_curvature.options import Distance, PDFix


class InfoNCELoss(RowLoss):
    r"""InfoNCE: a separate softmax for every positive pair against the negatives of its anchor.

    With the temperature ``tau``, the positives ``P(i)`` and the negatives ``N(i)`` of anchor i, over all positive pairs
    of an anchor and another point:

    .. math::
        L = \operatorname{mean}_{(i, p)} \; - \log
            \frac{\exp(s_{ip} / \tau)}{\exp(s_{ip} / \tau) + \sum_{n \in N(i)} \exp(s_{in} / \tau)}

    Unlike :class:`~contrastive_curvature.losses.supcon .SupConLoss`, the denominator does not contain the anchor's
    other positives. A positive that counts m times adds m terms, a negative that counts m times adds m addends.

    Anchors without a positive are left out of the mean. For an anchor without a negative, the terms are zero and count
    in the mean.

    The same loss elsewhere: ``NTXentLoss`` of pytorch-metric-learning and NT-Xent of SimCLR (one tower, with labels for
    the views of one input), ``MultipleNegativesRankingLoss`` of sentence-transformers (two towers with
    ``directions="a"``, ``scale=20.0``), and the loss of CLIP (two towers, ``directions="both"``).

    Args:
        temperature: ``tau``, positive; by default 0.1.
        reduction: See :class:`~contrastive_curvature.losses.row_loss.RowLoss`; the terms are the positive pairs.
        directions: See :class:`~contrastive_curvature.losses.row_loss.RowLoss`.
        scale: ``1 / tau``, positive; used instead of the temperature.
        distance: See :class:`~contrastive_curvature.options.Distance`.
        pd_fix: See :class:`~contrastive_curvature.options.PDFix`.

    Raises:
        InputError: An option is unknown or out of range, or both a temperature and a scale are passed.

    Source: van den Oord et al., Representation Learning with Contrastive Predictive Coding, 2018, Eq. 4; Chen et al., A
    Simple Framework for Contrastive Learning of Visual Representations, 2020, Eq. 1.
    """

    root_signs = (-1, 1)
    shift_invariant = True
    supervised = False

    def __init__(
        self,
        temperature: float | Tensor | None = None,
        reduction: str = "mean",
        directions: str = "both",
        *,
        scale: float | Tensor | None = None,
        distance: Distance | str = Distance.ARCCOS,
        pd_fix: PDFix | str = PDFix.PSD_PARTS,
    ) -> None:
        super().__init__(reduction, directions, distance=distance, pd_fix=pd_fix)
        if temperature is not None and scale is not None:
            got = f"temperature={temperature!r} and scale={scale!r}"
            raise InputError("temperature, scale", "one of both", got, "scale is 1 / temperature.")
        if scale is not None:
            temperature = 1 / validate.hyperparameter("scale", scale, positive=True)
        self.temperature = check_temperature(0.1 if temperature is None else temperature)

    def _counts(self, positive: Tensor, negative: Tensor) -> Tensor:
        return positive.sum(1)

    def _value(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        logits = cosine / self.temperature
        gap = logits - weighted_logsumexp(logits, negative).unsqueeze(1)
        # ``logsigmoid`` instead of torch's softplus, which is linear above 20 and loses eight digits there.
        return -(positive * F.logsigmoid(gap)).sum(1)

    def _statistics(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        logits = cosine / self.temperature
        log_sum = weighted_logsumexp(logits, negative)
        gap = logits - log_sum.unsqueeze(1)
        miss = positive * torch.sigmoid(-gap)
        return torch.stack([log_sum, miss.sum(1), (miss * torch.sigmoid(gap)).sum(1)], dim=1)

    def _terms(self, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor) -> RowTerms:
        # With pi_p = sigma(a_p - log Z), the shares nu of the negatives in Z, G = sum_p m_p (1 - pi_p), w_p = m_p pi_p
        # (1 - pi_p) and V = sum_p w_p, the second derivatives are diag(w, G nu) - w nu^T - nu w^T - (G - V) nu nu^T.
        # All parts of the two roots are as large as sqrt(G), so nothing large cancels.
        log_sum, miss, spread = statistics.unsqueeze(2).unbind(1)
        logits = cosine / self.temperature
        gap = logits - log_sum
        wrong = positive * torch.sigmoid(-gap)
        weight = wrong * torch.sigmoid(gap)
        share = torch.where(negative > 0, negative * gap.exp(), 0.0)
        first = miss * share - wrong
        size = miss.sqrt()
        safe = torch.where(size > 0, size, 1.0)
        root = weight / safe
        half = spread / (2 * safe)
        roots = (root + (size - half) * share, root - half * share)
        tau = self.temperature
        return RowTerms(first / tau, (weight + miss * share) / tau**2, (roots[0] / tau, roots[1] / tau))
