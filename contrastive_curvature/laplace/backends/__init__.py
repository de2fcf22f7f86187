"""Thin adapters that hand the output Hessian to a host library and its answer back."""

from contrastive_curvature.laplace.backends.base import ContrastiveBackend, ContrastiveGGN

__all__ = ["ContrastiveBackend", "ContrastiveGGN"]
