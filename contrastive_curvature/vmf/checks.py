"""Checks of dimensions, concentrations and directions, and the division of vectors by their norm."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError


def check_dim(dim: object) -> int:
    """Return the ambient dimension if it is an integer of at least 2."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise InputTypeError("dim", "an int, the ambient dimension D", dim)
    if dim < 2:
        raise InputError("dim", "D >= 2", dim, "The sphere of R^1 is two points.")
    return dim


def check_kappa(kappa: object, name: str = "kappa") -> Tensor:
    """Return concentrations that are finite and not negative; half precision becomes float32."""
    checked = validate.real(name, kappa)
    if bool((checked < 0).any()):
        lowest = float(checked.min())
        raise InputError(name, ">= 0", lowest, "For the opposite direction, negate mu instead.")
    return checked


def unit(name: str, value: object) -> tuple[Tensor, Tensor]:
    """Divide vectors by their norm, without overflow or underflow of the squared norm.

    Args:
        name: Name of the argument, for the error messages.
        value: Vectors, shape (..., D), D >= 2, finite, none of them zero.

    Returns:
        Unit vectors (..., D) and norms (...). Gradients flow through both.
    """
    vectors = validate.real(name, value)
    if vectors.ndim < 1 or vectors.shape[-1] < 2:
        raise InputError(name, "shape (..., D) with D >= 2", tuple(vectors.shape))
    scale = vectors.detach().abs().amax(-1, keepdim=True)
    zeros = int((scale == 0).sum())
    if zeros:
        raise InputError(name, "non-zero vectors", f"{zeros} zero vectors", "A zero vector has no direction.")
    scaled = vectors / scale
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / norm, (norm * scale).squeeze(-1)


def same_dim(**tensors: Tensor) -> int:
    """Return the length of the last axis, which must be equal for all tensors."""
    dims = {name: t.shape[-1] for name, t in tensors.items()}
    if len(set(dims.values())) > 1:
        shown = ", ".join(f"{name} {dim}" for name, dim in dims.items())
        raise InputError(", ".join(tensors), "one dimension D", shown)
    return next(iter(dims.values()))


def broadcast_batch(**tensors: tuple[Tensor, int]) -> torch.Size:
    """Return the common batch shape of tensors; each comes with its number of last axes that are not batch axes."""
    shapes = {name: tuple(t.shape[: t.ndim - core]) for name, (t, core) in tensors.items()}
    try:
        return torch.broadcast_shapes(*shapes.values())
    except RuntimeError:
        shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InputError("batch shapes", "shapes that broadcast", shown) from None
