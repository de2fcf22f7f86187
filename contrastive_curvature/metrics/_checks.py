"""Input checks of the metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = ["check_count", "check_embeddings", "check_labels", "check_scores", "check_tensor"]


def check_tensor(name: str, value: object) -> Tensor:
    """Return ``value``, detached, if it is a tensor.

    Raises:
        InputTypeError: If ``value`` is not a tensor.
    """
    if not isinstance(value, Tensor):
        raise InputTypeError(expected(name, "a torch.Tensor", type(value).__name__))
    validate.dense(name, value)
    return value.detach()


def check_count(name: str, value: object, least: int, most: int | None = None, why: str = "") -> int:
    """Return ``value`` if it is an int from ``least`` to ``most``.

    Raises:
        InputTypeError: If ``value`` is not an int.
        InputError: If ``value`` is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputTypeError(expected(name, "an int", value))
    if value < least or (most is not None and value > most):
        wanted = f">= {least}" if most is None else f"between {least} and {most}"
        raise InputError(expected(name, wanted, value, why))
    return value


def check_embeddings(name: str, value: object, zeros: bool = False) -> Tensor:
    """Return embeddings (N, D) if they are finite, not empty and, unless ``zeros``, have no zero row.

    Raises:
        InputTypeError: If ``value`` is not a floating-point tensor.
        InputError: If the shape is not (N, D), an entry is not finite, or a row is zero, which has no cosine
            similarity.
    """
    checked = check_tensor(name, value)
    if not checked.is_floating_point():
        raise InputTypeError(expected(name, "a floating-point tensor", str(checked.dtype)))
    if checked.ndim != 2 or checked.numel() == 0:
        raise InputError(expected(name, "shape (N, D), not empty", tuple(checked.shape)))
    if not bool(torch.isfinite(checked).all()):
        raise InputError(expected(name, "finite entries", "NaN or infinity"))
    zero_rows = 0 if zeros else int((checked == 0).all(1).sum())
    if zero_rows:
        hint = "A zero row has no cosine similarity."
        raise InputError(expected(name, "non-zero rows", f"{zero_rows} zero rows", hint))
    return checked


def check_labels(name: str, value: object, length: int | None = None) -> Tensor:
    """Return labels (N,) as int64.

    Raises:
        InputTypeError: If ``value`` is not a tensor of an integer dtype.
        InputError: If ``value`` is not one-dimensional, is empty, or does not have ``length`` entries.
    """
    checked = check_tensor(name, value)
    if checked.is_floating_point() or checked.is_complex() or checked.dtype == torch.bool:
        raise InputTypeError(expected(name, "an integer tensor", str(checked.dtype), "Convert it with .long()."))
    wanted = "(N,)" if length is None else f"({length},)"
    if checked.ndim != 1 or checked.numel() == 0 or (length is not None and len(checked) != length):
        raise InputError(expected(name, f"shape {wanted}, not empty", tuple(checked.shape)))
    return checked.long()


def check_scores(name: str, value: object, length: int | None = None) -> Tensor:
    """Return finite scores (N,) in float64.

    Raises:
        InputTypeError: If ``value`` is not a real tensor.
        InputError: If ``value`` is not one-dimensional, is empty, does not have ``length`` entries, or is not finite.
    """
    checked = check_tensor(name, value)
    if checked.is_complex():
        raise InputTypeError(expected(name, "a real tensor", str(checked.dtype)))
    wanted = "(N,)" if length is None else f"({length},)"
    if checked.ndim != 1 or checked.numel() == 0 or (length is not None and len(checked) != length):
        raise InputError(expected(name, f"shape {wanted}, not empty", tuple(checked.shape)))
    checked = checked.double()
    if not bool(torch.isfinite(checked).all()):
        raise InputError(expected(name, "finite scores", "NaN or infinity"))
    return checked
