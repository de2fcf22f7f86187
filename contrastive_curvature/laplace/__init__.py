"""Parameter curvature -> Laplace posterior -> embedding distribution, inside laplace-torch."""

from contrastive_curvature.laplace.advice import DefaultPriorWarning, FeatureNormWarning, LabelWarning
from contrastive_curvature.laplace.base import ContrastiveLaplace
from contrastive_curvature.laplace.classes import (
    ContrastiveDiagLaplace,
    ContrastiveDiagLLLaplace,
    ContrastiveDiagSubnetLaplace,
    ContrastiveFullLaplace,
    ContrastiveFullLLLaplace,
    ContrastiveFullSubnetLaplace,
    ContrastiveKronLaplace,
    ContrastiveKronLLLaplace,
    ContrastiveLowRankLaplace,
)
from contrastive_curvature.laplace.kron_lowrank import ContrastiveKronLowRankLLLaplace
from contrastive_curvature.laplace.towers import TwoTowerLaplace

__all__ = [
    "ContrastiveDiagLLLaplace",
    "ContrastiveDiagLaplace",
    "ContrastiveDiagSubnetLaplace",
    "ContrastiveFullLLLaplace",
    "ContrastiveFullLaplace",
    "ContrastiveFullSubnetLaplace",
    "ContrastiveKronLLLaplace",
    "ContrastiveKronLaplace",
    "ContrastiveKronLowRankLLLaplace",
    "ContrastiveLaplace",
    "ContrastiveLowRankLaplace",
    "DefaultPriorWarning",
    "FeatureNormWarning",
    "LabelWarning",
    "TwoTowerLaplace",
]
