"""curvlinops: a matrix-free operator, K-FAC and EK-FAC of a pair loss, and a pullback."""

from contrastive_curvature.hosts.curvlinops.kfac import CurvlinopsPullback, contrastive_ekfac, contrastive_kfac
from contrastive_curvature.hosts.curvlinops.operator import ContrastiveGGNLinearOperator

__all__ = [
    "ContrastiveGGNLinearOperator",
    "CurvlinopsPullback",
    "contrastive_ekfac",
    "contrastive_kfac",
]
