"""Numerical helpers for curvatures: a check for NaN and infinity that names layer and batch, and decompositions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError
from contrastive_curvature.network.pullback import full_precision

if TYPE_CHECKING:
    from contrastive_curvature.network.pullback import Pullback


def all_finite(tensors: list[Tensor]) -> Tensor:
    """Return whether all entries are finite, as a boolean tensor with one entry."""
    return torch.stack([tensor.isfinite().all() for tensor in tensors]).all()


def sum_is_finite(tensors: list[Tensor]) -> Tensor:
    """Return whether the sum of all entries is finite, in a third of the time; if so, all entries are finite."""
    return torch.stack([tensor.sum() for tensor in tensors]).sum().isfinite()


def check_finite(curvature: Any, pullback: Pullback, where: str) -> None:
    """Refuse a curvature with NaN or infinity.

    Args:
        curvature: (P,), (P, P), or a list of tensors for every parameter.
        pullback: Pullback that knows the names of the parameters.
        where: Origin of the numbers, for the message.
    """
    tensors = [curvature] if isinstance(curvature, Tensor) else [factor for group in curvature for factor in group]
    if bool(sum_is_finite(tensors)) or bool(all_finite(tensors)):
        return
    if isinstance(curvature, Tensor):
        bad = ~curvature.isfinite()
        entries = bad if bad.ndim == 1 else bad.any(dim=1)
        if bad.ndim == 2 and bad.shape[0] == bad.shape[1] and bool(bad.diagonal().any()):
            # A row also holds products with other layers; the diagonal entry belongs to one parameter alone.
            entries = bad.diagonal()
        name = pullback.parameter_at(int(entries.nonzero()[0]))
    else:
        groups = [not all(bool(factor.isfinite().all()) for factor in group) for group in curvature]
        name = pullback.named_sizes()[groups.index(True)][0]
    layer = name.rpartition(".")[0] or name
    hint = (
        "Check for inputs that are not finite, or whose squares overflow (beyond 1e19 in float32). Leave them out or "
        "scale them; float64 reaches 1e154."
    )
    got = f"NaN or infinity in layer {layer!r} (parameter {name!r}), first in {where}"
    raise InputError("curvature", "finite numbers", got, hint)


def eigenpairs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of a symmetric matrix; only the upper triangle is read."""
    if not bool(matrix.isfinite().all()):
        raise InputError("curvature", "finite numbers", "NaN or infinity")
    for dtype in (matrix.dtype, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(matrix.to(dtype), UPLO="U")
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        values, vectors = values.to(matrix.dtype), vectors.to(matrix.dtype)
        if bool(values.isfinite().all() & vectors.isfinite().all()):
            return values, vectors
    got = f"one of shape {tuple(matrix.shape)} with entries up to {float(matrix.abs().max()):.3g}"
    hint = "Scale the inputs, or use hessian_structure='diag', which needs no eigenvalues."
    raise InputError("curvature", "a matrix whose eigenvalues can be computed", got, hint)


@full_precision
def clamped_matrix(matrix: Tensor) -> Tensor:
    """Return a symmetric matrix with its negative eigenvalues set to zero."""
    values, vectors = eigenpairs(matrix)
    if not values.numel() or values[0] >= 0:
        return matrix
    return (vectors * values.clamp(min=0)) @ vectors.T
