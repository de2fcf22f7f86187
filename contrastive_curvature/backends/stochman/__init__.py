"""StochMan: layers with Jacobian sandwiches, a converter, the paper's Hessian calculators, and the laplace adapter."""

from contrastive_curvature.backends.stochman import layers
from contrastive_curvature.backends.stochman.backend import StochManContrastiveGGN
from contrastive_curvature.backends.stochman.calculators import (
    ArccosHessianCalculator,
    ContrastiveHessianCalculator,
    HessianCalculator,
)
from contrastive_curvature.backends.stochman.composite import Residual, Sequential
from contrastive_curvature.backends.stochman.convert import to_nnj
from contrastive_curvature.backends.stochman.layer import SandwichLayer
from contrastive_curvature.backends.stochman.pullback import StochManPullback

__all__ = [
    "ArccosHessianCalculator",
    "ContrastiveHessianCalculator",
    "HessianCalculator",
    "Residual",
    "SandwichLayer",
    "Sequential",
    "StochManContrastiveGGN",
    "StochManPullback",
    "layers",
    "to_nnj",
]
