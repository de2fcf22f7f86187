"""The eigendecomposition of Kronecker factors; laplace-torch's own ends the process where it fails."""

from __future__ import annotations

import torch
from laplace.utils.matrix import KronDecomposed

from contrastive_curvature.fit.finite import eigenpairs
from contrastive_curvature.network.pullback import KronFactors

__all__ = ["decompose_factors"]


def decompose_factors(factors: KronFactors, damping: bool = False) -> KronDecomposed:
    """Decompose Kronecker factors, negative eigenvalues set to zero.

    Args:
        factors: ``[G, A]`` for every matrix, ``[block]`` for every vector.
        damping: As in laplace-torch.

    Returns:
        laplace-torch's decomposed factors, as its ``Kron.decompose`` gives them.

    Raises:
        InputError: A factor is not finite, or its eigenvalues cannot be computed.
    """
    pairs = [[eigenpairs(factor) for factor in group] for group in factors]
    values = [[value.clamp(min=0) for value, _ in group] for group in pairs]
    vectors: list[list[torch.Tensor]] = [[vector for _, vector in group] for group in pairs]
    return KronDecomposed(vectors, values, damping=damping)
