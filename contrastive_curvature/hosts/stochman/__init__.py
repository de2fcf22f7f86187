"""StochMan: the Hessian calculators of the paper on the layers of ``stochman.nnj``, and a converter to these layers."""

from contrastive_curvature.hosts.stochman.calculators import (
    ArccosHessianCalculator,
    ContrastiveHessianCalculator,
    HessianCalculator,
)
from contrastive_curvature.hosts.stochman.convert import to_nnj
from contrastive_curvature.hosts.stochman.sweep import StochManPullback

__all__ = [
    "ArccosHessianCalculator",
    "ContrastiveHessianCalculator",
    "HessianCalculator",
    "StochManPullback",
    "to_nnj",
]
