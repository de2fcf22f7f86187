"""Adapter to curvlinops: matrix-free operators, K-FAC and EK-FAC of the contrastive loss."""

from contrastive_curvature.backends.curvlinops.backend import CurvlinopsContrastiveGGN
from contrastive_curvature.backends.curvlinops.kfac import contrastive_ekfac, contrastive_kfac
from contrastive_curvature.backends.curvlinops.operator import ContrastiveGGNLinearOperator
from contrastive_curvature.backends.curvlinops.pullback import CurvlinopsPullback

__all__ = [
    "ContrastiveGGNLinearOperator",
    "CurvlinopsContrastiveGGN",
    "CurvlinopsPullback",
    "contrastive_ekfac",
    "contrastive_kfac",
]
