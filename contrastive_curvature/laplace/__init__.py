"""Parameter curvature -> Laplace posterior -> embedding distribution, inside laplace-torch."""

from contrastive_curvature.laplace.advice import DefaultPriorWarning, FeatureNormWarning, LabelWarning
from contrastive_curvature.laplace.posterior import ContrastiveLaplace
from contrastive_curvature.laplace.tower_posteriors import TwoTowerLaplace
from contrastive_curvature.removed import refuse_removed

__all__ = [
    "ContrastiveLaplace",
    "DefaultPriorWarning",
    "FeatureNormWarning",
    "LabelWarning",
    "TwoTowerLaplace",
]

__getattr__ = refuse_removed(__name__)
