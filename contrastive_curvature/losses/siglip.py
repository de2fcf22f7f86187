"""The sigmoid loss of image and text towers."""

from __future__ import annotations

from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.losses.logistic import same_or_not, slopes_of_same
from contrastive_curvature.losses.row_loss import RowLoss, RowTerms
from contrastive_curvature.options import Distance, PDFix


class SigLIPLoss(RowLoss):
    r"""Sigmoid loss: a logistic loss of "same class?" for every pair of an anchor and a candidate.

    With ``y_ij = 1`` for positives and ``-1`` for negatives, and the candidates ``A(i)`` of anchor i, over anchors:

    .. math::
        L = - \operatorname{mean}_i \sum_{j \in A(i)} \log \sigma(y_{ij} (a s_{ij} + b))

    A pair that counts m times adds m terms. Anchors without a candidate are left out of the mean.

    With two towers of N points each and ``directions="both"`` this is the published loss: each direction sums the same
    pairs, and the sum is divided by the batch size N, not by the number of pairs. So the loss equals ``N *
    binary_cross_entropy_with_logits(a * s + b, eye(N))`` in torch, whose mean runs over the ``N^2`` pairs. In one tower
    every unordered pair counts twice, once for each of its points.

    Args:
        scale: ``a``, positive; the published ``t = exp(t')``, with parameter ``t'``; 10 at the start of training.
        bias: ``b``; -10 at the start of training.
        reduction: See :class:`~contrastive_curvature.losses.row_loss.RowLoss`; the terms are the anchors.
        directions: See :class:`~contrastive_curvature.losses.row_loss.RowLoss`.
        distance: See :class:`~contrastive_curvature.options.Distance`.
        pd_fix: See :class:`~contrastive_curvature.options.PDFix`.

    Raises:
        InputError: An option is unknown or out of range.

    Source: Zhai et al., Sigmoid Loss for Language Image Pre-Training, 2023, Algorithm 1.
    """

    supervised = False

    def __init__(
        self,
        scale: float | Tensor = 10.0,
        bias: float | Tensor = -10.0,
        reduction: str = "mean",
        directions: str = "both",
        *,
        distance: Distance | str = Distance.ARCCOS,
        pd_fix: PDFix | str = PDFix.PSD_PARTS,
    ) -> None:
        super().__init__(reduction, directions, distance=distance, pd_fix=pd_fix)
        self.scale = validate.hyperparameter("scale", scale, positive=True)
        self.bias = validate.hyperparameter("bias", bias, signed=True)

    def _counts(self, positive: Tensor, negative: Tensor) -> Tensor:
        return ((positive > 0) | (negative > 0)).any(1).to(positive.dtype)

    def _value(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return same_or_not(self.scale * cosine + self.bias, positive, negative).sum(1)

    def _statistics(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return cosine.new_zeros(len(cosine), 0)

    def _terms(self, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor) -> RowTerms:
        first, second = slopes_of_same(self.scale * cosine + self.bias, positive, negative)
        return RowTerms(self.scale * first, self.scale**2 * second)
