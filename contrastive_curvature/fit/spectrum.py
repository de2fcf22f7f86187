"""Eigenvalues of symmetric matrices, with a clear error if the decomposition fails."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected

__all__ = ["eigenpairs"]


def eigenpairs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a symmetric matrix; only the upper triangle is read.

    Args:
        matrix: Shape (P, P).

    Returns:
        Eigenvalues in ascending order, shape (P,), and eigenvectors as columns, shape (P, P).

    Raises:
        InputError: An entry is not finite, or the decomposition fails even in float64.
    """
    if not bool(matrix.isfinite().all()):
        raise InputError(expected("curvature", "finite numbers", "NaN or infinity"))
    for dtype in (matrix.dtype, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(matrix.to(dtype), UPLO="U")
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        values, vectors = values.to(matrix.dtype), vectors.to(matrix.dtype)
        if bool(values.isfinite().all() & vectors.isfinite().all()):
            return values, vectors
    received = f"one of shape {tuple(matrix.shape)} with entries up to {float(matrix.abs().max()):.3g}"
    hint = "Scale the inputs, or use hessian_structure='diag', which needs no eigenvalues."
    raise InputError(expected("curvature", "a matrix whose eigenvalues can be computed", received, hint))
