"""The contrastive loss with a soft threshold, for points on the sphere."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.hessian.blocks import UnrepresentableError
from contrastive_curvature.losses.base import PairLoss, Terms
from contrastive_curvature.losses.logistic import same_or_not, slopes_of_same
from contrastive_curvature.options import Distance, Normalization, PDFix

_MEETING = 64
"""Rounding errors by which ``2 - 2 s`` of a point and itself may differ from zero."""


class SoftContrastiveLoss(PairLoss):
    r"""Soft contrastive loss: logistic regression of "same class?" on the distance of a pair.

    With the distance ``d_ij = |u_i - u_j| = sqrt(2 - 2 s_ij)`` of unit embeddings, over unordered pairs ``{i, j}``:

    .. math::
        L = - \sum_{pos} w^+_{ij} \log \sigma(-a d_{ij} + b) - \sum_{neg} w^-_{ij} \log \sigma(a d_{ij} - b)

    The second derivative in the cosine is negative for close positives, so that the second-order part alone
    (``pd_fix="ggn"``) is indefinite. The second derivative is unbounded where two embeddings meet (``d = 0``): the loss
    then has a value, with a zero gradient for this pair, but its Hessian is refused. Close points cost digits: a
    curvature of parameters has a relative error of up to ``eps / d^3`` (``docs/theory.md``).

    With the squared distance, ``b - a d^2``, the loss would be the convex
    :class:`~contrastive_curvature.losses.LogisticLoss` with ``scale=2 * a`` and ``bias=b - 2 * a``. The paper's points
    are not restricted to the sphere: :func:`contrastive_curvature.hedged.soft_contrastive_loss`.

    Args:
        a: Slope per unit of distance, positive.
        b: Intercept; the probability of "same" is one half at the distance ``b / a``.
        negative_weight: See :class:`~contrastive_curvature.losses.PairLoss`.
        normalization: See :class:`~contrastive_curvature.losses.PairLoss`.
        distance: See :class:`~contrastive_curvature.options.Distance`; not the distance ``d`` above.
        pd_fix: See :class:`~contrastive_curvature.options.PDFix`.

    Raises:
        InputError: An option is unknown or out of range.

    Source: Oh et al., Modeling Uncertainty with Hedged Instance Embedding, 2019, Eq. 2 and 3 (with the sign of
    :func:`~contrastive_curvature.hedged.match_logits`).
    """

    convex = False

    def __init__(
        self,
        a: float | Tensor = 1.0,
        b: float | Tensor = 0.0,
        negative_weight: float = 0.5,
        normalization: Normalization | str = Normalization.ANCHOR,
        *,
        distance: Distance | str = Distance.ARCCOS,
        pd_fix: PDFix | str = PDFix.FIXED,
    ) -> None:
        super().__init__(negative_weight, normalization, distance=distance, pd_fix=pd_fix)
        self.a = validate.hyperparameter("a", a, positive=True)
        self.b = validate.hyperparameter("b", b, signed=True)

    def _value(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Tensor:
        squared = 2 - 2 * cosine
        met = _meet(squared)
        # The root has no derivative at zero, and autograd would return NaN even where the root is not used.
        length = torch.where(met, 0.0, torch.where(met, 1.0, squared).sqrt())
        return same_or_not(self.b - self.a * length, attract, repel).sum()

    def _terms(self, cosine: Tensor, attract: Tensor, repel: Tensor) -> Terms:
        squared = 2 - 2 * cosine
        met = _meet(squared)
        if bool((met & ((attract + repel) > 0)).any()):
            wanted = "pairs of embeddings that differ, since the derivatives grow without bound as two meet"
            hint = "Use LogisticLoss, whose derivatives are bounded, or leave duplicates out."
            raise UnrepresentableError("SoftContrastiveLoss", wanted, "some that meet", hint)
        length = torch.where(met, 1.0, squared).sqrt()
        slope = torch.where(met, 0.0, self.a / length)
        bend = slope / length.square()
        pull, bent = slopes_of_same(self.b - self.a * length, attract, repel)
        return Terms(slope * pull, slope.square() * bent + bend * pull)


def _meet(squared: Tensor) -> Tensor:
    """Return whether two embeddings are the same up to rounding, from their squared distance."""
    return squared <= _MEETING * torch.finfo(squared.dtype).eps
