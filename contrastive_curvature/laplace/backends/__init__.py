"""Thin adapters that pass the output Hessian to a host library and return its curvature."""

from contrastive_curvature.laplace.backends.backend import ContrastiveBackend, ContrastiveGGN
from contrastive_curvature.removed import refuse_removed

__all__ = ["ContrastiveBackend", "ContrastiveGGN"]

__getattr__ = refuse_removed(__name__)
