"""The multi-similarity loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from contrastive_curvature import validate
from contrastive_curvature.losses.row_loss import RowLoss, RowTerms, weighted_logsumexp
from contrastive_curvature.options import Distance, PDFix


class MultiSimilarityLoss(RowLoss):
    r"""Multi-similarity loss: soft maxima over too distant positives and over too close negatives.

    With the positives ``P(i)`` and the negatives ``N(i)`` of anchor i and ``base`` as ``lambda``, over anchors:

    .. math::
        L = \operatorname{mean}_i \;
            \frac1\alpha \log \Bigl( 1 + \sum_{p \in P(i)} \exp(-\alpha (s_{ip} - \lambda)) \Bigr)
          + \frac1\beta \log \Bigl( 1 + \sum_{n \in N(i)} \exp(\beta (s_{in} - \lambda)) \Bigr)

    A candidate that counts m times adds m addends. The loss does not contain the paper's pair mining: pass a miner's
    tuples as ``pairs``. Anchors without any candidate are left out of the mean. ``MultiSimilarityLoss`` of
    pytorch-metric-learning is the same, except that it counts anchors without mined pairs as zeros.

    Args:
        alpha: Steepness for positives, positive.
        beta: Steepness for negatives, positive.
        base: ``lambda``, the cosine above which negatives count and below which positives count.
        reduction: See :class:`~contrastive_curvature.losses.row_loss.RowLoss`; the terms are the anchors.
        directions: See :class:`~contrastive_curvature.losses.row_loss.RowLoss`.
        distance: See :class:`~contrastive_curvature.options.Distance`.
        pd_fix: See :class:`~contrastive_curvature.options.PDFix`.

    Raises:
        InputError: An option is unknown or out of range.

    Source: Wang et al., Multi-Similarity Loss with General Pair Weighting for Deep Metric Learning, 2019
    (the loss that results from its mining and weighting).
    """

    root_signs = (-1, -1)

    def __init__(
        self,
        alpha: float | Tensor = 2.0,
        beta: float | Tensor = 50.0,
        base: float | Tensor = 0.5,
        reduction: str = "mean",
        directions: str = "both",
        *,
        distance: Distance | str = Distance.ARCCOS,
        pd_fix: PDFix | str = PDFix.PSD_PARTS,
    ) -> None:
        super().__init__(reduction, directions, distance=distance, pd_fix=pd_fix)
        self.alpha = validate.hyperparameter("alpha", alpha, positive=True)
        self.beta = validate.hyperparameter("beta", beta, positive=True)
        self.base = validate.hyperparameter("base", base, signed=True)

    def _counts(self, positive: Tensor, negative: Tensor) -> Tensor:
        return ((positive > 0) | (negative > 0)).any(1).to(positive.dtype)

    def _value(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        far, close = self._log_sums(cosine, positive, negative)
        return far / self.alpha + close / self.beta

    def _statistics(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return torch.stack(self._log_sums(cosine, positive, negative), dim=1)

    def _terms(self, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor) -> RowTerms:
        far, close = statistics.unsqueeze(2).unbind(1)
        p = positive * torch.where(positive > 0, -self.alpha * (cosine - self.base) - far, 0.0).exp()
        q = negative * torch.where(negative > 0, self.beta * (cosine - self.base) - close, 0.0).exp()
        roots = (self.alpha**0.5 * p, self.beta**0.5 * q)
        return RowTerms(q - p, self.alpha * p + self.beta * q, roots)

    def _log_sums(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``log(1 + sum)`` over the positives and over the negatives, each (B,)."""
        over = cosine - self.base
        return _log_one_plus(-self.alpha * over, positive), _log_one_plus(self.beta * over, negative)


def _log_one_plus(logits: Tensor, times: Tensor) -> Tensor:
    """Return ``log(1 + sum_j m_j exp(logit_j))``, shape (B,)."""
    return weighted_logsumexp(F.pad(logits, (0, 1)), F.pad(times, (0, 1), value=1.0))
