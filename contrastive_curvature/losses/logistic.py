"""The logistic pair loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from contrastive_curvature import validate
from contrastive_curvature.losses.base import PairLoss, Terms
from contrastive_curvature.options import Distance, Normalization, PDFix


class LogisticLoss(PairLoss):
    r"""Logistic regression of "same class?" on the cosine of a pair (the SigLIP loss for pairs of one encoder).

    With ``s_ij = u_i . u_j``, over unordered pairs ``{i, j}``:

    .. math::
        L = - \sum_{pos} w^+_{ij} \log \sigma(a s_{ij} + b) - \sum_{neg} w^-_{ij} \log \sigma(-(a s_{ij} + b))

    There is no margin: every pair counts, and the second derivative in the cosine, ``a^2 sigma (1 - sigma)``, is
    positive. A logit ``b - a d^2`` of the squared distance of unit embeddings has ``scale=2 * a`` and
    ``bias=b - 2 * a``.

    Args:
        scale: ``a``, positive: how fast the probability of "same" rises with the cosine.
        bias: ``b``; with ``-a t`` the probability is one half at the cosine ``t``.
        negative_weight: See :class:`~contrastive_curvature.losses.PairLoss`.
        normalization: See :class:`~contrastive_curvature.losses.PairLoss`.
        distance: See :class:`~contrastive_curvature.options.Distance`.
        pd_fix: See :class:`~contrastive_curvature.options.PDFix`.

    Raises:
        InputError: An option is unknown or out of range.
    """

    def __init__(
        self,
        scale: float | Tensor = 10.0,
        bias: float | Tensor = -5.0,
        negative_weight: float = 0.5,
        normalization: Normalization | str = Normalization.ANCHOR,
        *,
        distance: Distance | str = Distance.ARCCOS,
        pd_fix: PDFix | str = PDFix.FIXED,
    ) -> None:
        super().__init__(negative_weight, normalization, distance=distance, pd_fix=pd_fix)
        self.scale = validate.hyperparameter("scale", scale, positive=True)
        self.bias = validate.hyperparameter("bias", bias, signed=True)

    def _value(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Tensor:
        return same_or_not(self.scale * cosine + self.bias, attract, repel).sum()

    def _terms(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Terms:
        first, second = slopes_of_same(self.scale * cosine + self.bias, attract, repel)
        return Terms(self.scale * first, self.scale**2 * second)


def same_or_not(logit: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Compute the loss of each pair from its logit; it counts ``positive`` times as same, ``negative`` as other."""
    # Exact everywhere, unlike torch's softplus, which is linear above 20.
    return -(positive * F.logsigmoid(logit) + negative * F.logsigmoid(-logit))


def slopes_of_same(logit: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and second derivative of :func:`same_or_not` in the logit."""
    same, other = torch.sigmoid(logit), torch.sigmoid(-logit)
    return negative * same - positive * other, (positive + negative) * same * other
