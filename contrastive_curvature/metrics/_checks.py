"""Checks of the metrics' arguments: tensors, and scores and labels that may be arrays."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError

Array = TypeVar("Array", NDArray[Any], Tensor)


def check_tensor(name: str, value: object, wanted: str = "a torch.Tensor", hint: str = "") -> Tensor:
    """Return a dense tensor, detached."""
    if not isinstance(value, Tensor):
        raise InputTypeError(name, wanted, f"a {type(value).__name__}", hint)
    validate.dense(name, value)
    return value.detach()


def check_integers(name: str, value: object, wanted: str = "an integer tensor", hint: str = "") -> Tensor:
    """Return a tensor of an integer dtype, detached."""
    checked = check_tensor(name, value, wanted, hint)
    if checked.is_floating_point() or checked.is_complex() or checked.dtype == torch.bool:
        got = f"{checked.dtype}, shape {tuple(checked.shape)}"
        raise InputTypeError(name, wanted, got, hint or "Convert it with .long().")
    return checked


def check_rows(name: str, value: Tensor | NDArray[Any], length: int | None) -> None:
    """Refuse an empty array, or any shape but (N,), or (length,) if a length is passed."""
    if value.ndim != 1 or not len(value) or length not in (None, len(value)):
        wanted = "(N,)" if length is None else f"({length},)"
        raise InputError(name, f"shape {wanted}, not empty", tuple(value.shape))


def check_embeddings(name: str, value: object, zeros: bool = False, hint: str = "") -> Tensor:
    """Return finite embeddings (N, D), detached, without a zero row unless ``zeros``."""
    checked = validate.real(name, value).detach()
    if checked.ndim != 2 or checked.numel() == 0:
        raise InputError(name, "shape (N, D), not empty", tuple(checked.shape), hint)
    zero_rows = 0 if zeros else int((checked == 0).all(1).sum())
    if zero_rows:
        hint = "A zero row has no cosine similarity."
        raise InputError(name, "non-zero rows", f"{zero_rows} zero rows", hint)
    return checked


def check_labels(name: str, value: object, length: int | None = None) -> Tensor:
    """Return labels (N,) as int64."""
    checked = check_integers(name, value)
    check_rows(name, checked, length)
    return checked.long()


def check_scores(name: str, value: object) -> Tensor:
    """Return finite scores (N,) in float64."""
    checked = check_tensor(name, value)
    check_rows(name, checked, None)
    return validate.real(name, checked if checked.is_complex() else checked.double())


def check_k(k: object, most: int, why: str) -> int:
    """Return a number of neighbours from 1 to ``most``."""
    count = validate.count("k", k)
    if count > most:
        raise InputError("k", f"between 1 and {most}", k, why)
    return count


def numbers(argument: str, value: object, length: int | None = None) -> NDArray[np.float64]:
    """Return finite numbers (N,) in float64."""
    read = _numpy(argument, value, "numbers").astype(np.float64)
    check_rows(argument, read, length)
    if bad := int((~np.isfinite(read)).sum()):
        raise InputError(argument, "finite numbers", f"{bad} of {len(read)} NaN or infinite")
    return read


def truths(argument: str, value: object, length: int) -> NDArray[np.bool_]:
    """Return truth values (N,) from bools or from integers 0 and 1."""
    read = _numpy(argument, value, "truth values")
    check_rows(argument, read, length)
    if read.dtype.kind not in "biu" or not np.isin(read, (0, 1)).all():
        raise InputTypeError(argument, "bool, or integers 0 and 1", f"other values of {read.dtype}")
    return read.astype(bool)


def like(original: Array, result: NDArray[Any]) -> Array:
    """Return ``result`` in the form of ``original``: a tensor on its device, or an array."""
    return torch.from_numpy(result).to(original.device) if isinstance(original, Tensor) else result


def _numpy(argument: str, value: object, what: str) -> NDArray[Any]:
    if isinstance(value, Tensor):
        if value.is_complex():
            raise InputTypeError(argument, f"a tensor or an array of {what}", f"a tensor of {value.dtype}")
        value = value.detach().cpu()
        return (value.double() if value.is_floating_point() else value).numpy()
    validate.unmasked(argument, value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value
    got = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
    raise InputTypeError(argument, f"a tensor or an array of {what}", got)
