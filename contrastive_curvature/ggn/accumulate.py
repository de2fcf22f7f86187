"""The clamp that comes last, on an accumulated curvature."""

from __future__ import annotations

from torch import Tensor

from contrastive_curvature.ggn.spectrum import eigenpairs

__all__ = ["clamp_curvature"]


def clamp_curvature(curvature: Tensor) -> Tensor:
    """Make an accumulated curvature positive semidefinite, once, at the end.

    Args:
        curvature: A diagonal (P,) or a symmetric matrix (P, P).

    Returns:
        The diagonal with negative entries set to zero (paper, Eq. 108 and Proposition F.1), or the matrix with negative
        eigenvalues set to zero: an element-wise ReLU would not make a matrix positive semidefinite.

    Raises:
        InputError: A matrix is not finite, or its eigenvalues cannot be computed.
    """
    if curvature.ndim == 1:
        return curvature.clamp(min=0)
    symmetric = (curvature + curvature.T) / 2
    values, vectors = eigenpairs(symmetric)
    if not values.numel() or values[0] >= 0:
        return symmetric
    return (vectors * values.clamp(min=0)) @ vectors.T
