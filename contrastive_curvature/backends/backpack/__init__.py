"""BackPACK: the loss in its own extensions, extensions for indefinite and coupled Hessians, and a backend."""

from contrastive_curvature.backends.backpack.backend import BackPackContrastiveGGN
from contrastive_curvature.backends.backpack.extensions import CurvatureFactor, DiagCurvature
from contrastive_curvature.backends.backpack.factors import SignedFactor
from contrastive_curvature.backends.backpack.pullback import BackPackPullback
from contrastive_curvature.backends.backpack.registry import register, unregister

__all__ = [
    "BackPackContrastiveGGN",
    "BackPackPullback",
    "CurvatureFactor",
    "DiagCurvature",
    "SignedFactor",
    "register",
    "unregister",
]
