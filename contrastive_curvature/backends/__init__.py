"""Thin adapters that hand the output Hessian to a host library and its answer back."""

from contrastive_curvature.backends.torch_func import ContrastiveGGN

__all__ = ["ContrastiveGGN"]
