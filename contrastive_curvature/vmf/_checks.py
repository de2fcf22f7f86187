"""Input checks of the von Mises-Fisher functions, and the division of vectors by their norm."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = ["broadcast_batch", "check_dim", "check_finite", "check_kappa", "check_real", "unit"]


def check_real(name: str, value: object) -> Tensor:
    """Return ``value`` if it is a floating-point tensor; half precision is converted to float32.

    Raises:
        InputTypeError: If ``value`` is not a tensor of a real floating-point dtype.
    """
    if not isinstance(value, Tensor):
        raise InputTypeError(expected(name, "a torch.Tensor", type(value).__name__, "Wrap it with torch.tensor(...)."))
    validate.dense(name, value)
    if not value.is_floating_point():
        raise InputTypeError(expected(name, "a floating-point tensor", str(value.dtype), "Convert it with .double()."))
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def check_finite(name: str, value: Tensor) -> None:
    """Refuse NaN and infinity.

    Raises:
        InputError: If any entry is NaN or infinite.
    """
    bad = int((~torch.isfinite(value)).sum())
    if bad:
        raise InputError(expected(name, "finite entries", f"{bad} NaN or infinite of {value.numel()}"))


def check_dim(dim: object) -> int:
    """Return the ambient dimension if it is an integer of at least 2.

    Raises:
        InputTypeError: If ``dim`` is not an int.
        InputError: If ``dim`` is below 2. The unit sphere of R^1 is two points, on which there is no density.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise InputTypeError(expected("dim", "an int, the ambient dimension D", dim))
    if dim < 2:
        raise InputError(expected("dim", "D >= 2", dim, "The sphere of R^1 is two points."))
    return dim


def check_kappa(kappa: object) -> Tensor:
    """Return the concentration if it is a finite, non-negative floating-point tensor.

    Raises:
        InputTypeError: If ``kappa`` is not a floating-point tensor.
        InputError: If an entry is negative, NaN or infinite.
    """
    checked = check_real("kappa", kappa)
    check_finite("kappa", checked)
    if bool((checked < 0).any()):
        lowest = float(checked.min())
        raise InputError(expected("kappa", ">= 0", lowest, "For the opposite direction, negate mu instead."))
    return checked


def unit(name: str, value: object) -> tuple[Tensor, Tensor]:
    """Divide vectors by their norm, without overflow or underflow of the squared norm.

    Args:
        name: Name of the argument, for the error messages.
        value: Vectors, shape (..., D), D >= 2, none of them zero.

    Returns:
        Unit vectors (..., D) and norms (...). Gradients flow through both.

    Raises:
        InputTypeError: If ``value`` is not a floating-point tensor.
        InputError: If D < 2, an entry is not finite, or a vector is zero.
    """
    vectors = check_real(name, value)
    if vectors.ndim < 1 or vectors.shape[-1] < 2:
        raise InputError(expected(name, "shape (..., D) with D >= 2", tuple(vectors.shape)))
    check_finite(name, vectors)
    scale = vectors.detach().abs().amax(-1, keepdim=True)
    zeros = int((scale == 0).sum())
    if zeros:
        raise InputError(expected(name, "non-zero vectors", f"{zeros} zero vectors", "A zero vector has no direction."))
    scaled = vectors / scale
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / norm, (norm * scale).squeeze(-1)


def broadcast_batch(**tensors: tuple[Tensor, int]) -> torch.Size:
    """Return the common batch shape.

    Args:
        **tensors: For each argument name, the tensor and how many of its last axes are not batch axes.

    Raises:
        InputError: If the batch shapes do not broadcast, or the devices differ.
    """
    shapes = {name: tuple(t.shape[: t.ndim - core]) for name, (t, core) in tensors.items()}
    devices = {str(t.device) for t, _ in tensors.values()}
    if len(devices) > 1:
        raise InputError(expected(", ".join(tensors), "one device", " and ".join(sorted(devices))))
    try:
        return torch.broadcast_shapes(*shapes.values())
    except RuntimeError:
        shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InputError(expected("batch shapes", "shapes that broadcast", shown)) from None
