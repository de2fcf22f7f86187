"""Thin adapters that pass the output Hessian to a host library and return its curvature."""

from contrastive_curvature.laplace.backends.base import ContrastiveBackend, ContrastiveGGN

__all__ = ["ContrastiveBackend", "ContrastiveGGN"]
