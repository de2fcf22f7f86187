"""Curvatures as numbers: finite or refused by layer and batch, decomposed, and clamped once at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.network.full_precision import full_precision
from contrastive_curvature.network.pullback import KronFactors, Pullback


def is_finite(curvature: Tensor | KronFactors) -> Tensor:
    """Return whether all entries are finite, as a boolean tensor with one entry."""
    return torch.stack([tensor.isfinite().all() for tensor in _tensors(curvature)]).all()


def sum_is_finite(curvature: Tensor | KronFactors) -> Tensor:
    """Return whether the sum of all entries is finite, in a third of the time; only then all entries certainly are."""
    return torch.stack([tensor.sum() for tensor in _tensors(curvature)]).sum().isfinite()


def check_finite(curvature: Tensor | KronFactors, pullback: Pullback, where: str) -> None:
    """Refuse a curvature with NaN or infinity."""
    if bool(sum_is_finite(curvature)) or bool(is_finite(curvature)):
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
        name = pullback.parameter_name(groups.index(True))
    layer = name.rpartition(".")[0] or name
    hint = (
        "Check for inputs that are not finite, or whose squares overflow (beyond 1e19 in float32). Leave them out or "
        "scale them; float64 reaches 1e154."
    )
    received = f"NaN or infinity in layer {layer!r} (parameter {name!r}), first in {where}"
    raise InputError(expected("curvature", "finite numbers", received, hint))


def _tensors(curvature: Tensor | KronFactors) -> list[Tensor]:
    return [curvature] if isinstance(curvature, Tensor) else [factor for group in curvature for factor in group]


def eigenpairs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of a symmetric matrix; only the upper triangle is read."""
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


@full_precision
def clamp_curvature(curvature: Tensor) -> Tensor:
    """Make an accumulated curvature positive semidefinite, once, at the end."""
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
    """Divide the input factors, which are sums, by the number ``n`` of points."""
    return [[f[0], *(part / n for part in f[1:])] for f in factors]
