"""curvlinops: a matrix-free operator of the curvature of a loss."""

from contrastive_curvature.hosts.curvlinops.operator import ContrastiveGGNLinearOperator
from contrastive_curvature.removed import refuse_removed

__all__ = ["ContrastiveGGNLinearOperator"]

__getattr__ = refuse_removed(__name__)
