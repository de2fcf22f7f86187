"""Curvatures of batches are added as they are, and clamped once, at the end."""

from __future__ import annotations

from torch import Tensor

from contrastive_curvature.fit.spectrum import eigenpairs
from contrastive_curvature.network.full_precision import full_precision
from contrastive_curvature.network.pullback import KronFactors

__all__ = ["add_factors", "clamp_curvature", "clamp_factors", "per_point"]


def add_factors(a: KronFactors | None, b: KronFactors) -> KronFactors:
    """Add the Kronecker factors of two sets of points, factor by factor."""
    if a is None:
        return b
    return [[x + y for x, y in zip(f, g, strict=True)] for f, g in zip(a, b, strict=True)]


@full_precision
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


def clamp_factors(factors: KronFactors) -> KronFactors:
    """Set the negative eigenvalues of the curvature factors to zero; the input factors have none."""
    return [[clamp_curvature(f[0]), *f[1:]] for f in factors]


def per_point(factors: KronFactors, n: float) -> KronFactors:
    """Factors whose input factors are means over ``n`` points, from those whose input factors are sums."""
    return [[f[0], *(part / n for part in f[1:])] for f in factors]
