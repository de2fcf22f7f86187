"""Parameter curvature -> Laplace posterior -> embedding distribution, inside laplace-torch."""

from contrastive_curvature.laplace.advice import DefaultPriorWarning, FeatureNormWarning, LabelWarning
from contrastive_curvature.laplace.functional import FunctionSpaceLaplace
from contrastive_curvature.laplace.posterior import ContrastiveLaplace
from contrastive_curvature.laplace.towers import TwoTowerLaplace

__all__ = [
    "ContrastiveLaplace",
    "DefaultPriorWarning",
    "FeatureNormWarning",
    "FunctionSpaceLaplace",
    "LabelWarning",
    "TwoTowerLaplace",
]
