"""Adapter to curvlinops: matrix-free operators, K-FAC and EK-FAC of the contrastive loss."""

from contrastive_curvature.hosts.curvlinops.kfac import contrastive_ekfac, contrastive_kfac
from contrastive_curvature.hosts.curvlinops.operator import ContrastiveGGNLinearOperator
from contrastive_curvature.hosts.curvlinops.pullback import CurvlinopsPullback

__all__ = [
    "ContrastiveGGNLinearOperator",
    "CurvlinopsPullback",
    "contrastive_ekfac",
    "contrastive_kfac",
]
