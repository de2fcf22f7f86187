"""Scores and labels as NumPy arrays, from arrays and tensors alike."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError

Array = TypeVar("Array", NDArray[Any], Tensor)


def numbers(argument: str, value: object, length: int | None = None) -> NDArray[np.float64]:
    """Return finite numbers (N,) in float64."""
    read = _numpy(argument, value, "numbers").astype(np.float64)
    _check_shape(argument, read, length)
    if bad := int((~np.isfinite(read)).sum()):
        raise InputError(argument, "finite numbers", f"{bad} of {len(read)} NaN or infinite")
    return read


def truths(argument: str, value: object, length: int) -> NDArray[np.bool_]:
    """Return truth values (N,), given as bool or as integers 0 and 1."""
    read = _numpy(argument, value, "truth values")
    _check_shape(argument, read, length)
    if read.dtype.kind not in "biu" or not np.isin(read, (0, 1)).all():
        raise InputTypeError(argument, "bool, or integers 0 and 1", f"other values of {read.dtype}")
    return read.astype(bool)


def like(original: Array, result: NDArray[Any]) -> Array:
    """Return ``result`` as a tensor on the device of ``given``, or as an array, as ``given`` is."""
    return torch.from_numpy(result).to(original.device) if isinstance(original, Tensor) else result


def _numpy(argument: str, value: object, what: str) -> NDArray[Any]:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return (value.double() if value.is_floating_point() else value).numpy()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value
    received = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
    raise InputTypeError(argument, f"a tensor or an array of {what}", received)


def _check_shape(argument: str, value: NDArray[Any], length: int | None) -> None:
    if value.ndim != 1 or not len(value) or length not in (None, len(value)):
        wanted = "(N,), not empty" if length is None else f"({length},)"
        raise InputError(argument, f"shape {wanted}", f"shape {value.shape}")
