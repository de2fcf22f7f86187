"""StochMan: layers with Jacobian sandwiches, a converter, the paper's Hessian calculators, and the laplace adapter."""

from contrastive_curvature.hosts.stochman import layers
from contrastive_curvature.hosts.stochman.calculators import (
    ArccosHessianCalculator,
    ContrastiveHessianCalculator,
    HessianCalculator,
)
from contrastive_curvature.hosts.stochman.composite import Residual, Sequential
from contrastive_curvature.hosts.stochman.convert import to_nnj
from contrastive_curvature.hosts.stochman.layer import SandwichLayer
from contrastive_curvature.hosts.stochman.pullback import StochManPullback

__all__ = [
    "ArccosHessianCalculator",
    "ContrastiveHessianCalculator",
    "HessianCalculator",
    "Residual",
    "SandwichLayer",
    "Sequential",
    "StochManPullback",
    "layers",
    "to_nnj",
]
