"""Thin adapters that hand the output Hessian to a host library and its answer back."""

from contrastive_curvature.laplace.backends.base import ContrastiveBackend
from contrastive_curvature.laplace.backends.torch_func import ContrastiveGGN

__all__ = ["ContrastiveBackend", "ContrastiveGGN"]
