"""Checks of the metrics' arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError


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
        came = f"{checked.dtype}, shape {tuple(checked.shape)}"
        raise InputTypeError(name, wanted, came, hint or "Convert it with .long().")
    return checked


def check_rows(name: str, value: Tensor, length: int | None) -> None:
    """Refuse a tensor that is not of shape (N,), or (length,), or is empty."""
    if value.ndim != 1 or value.numel() == 0 or (length is not None and len(value) != length):
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


def check_scores(name: str, value: object, length: int | None = None) -> Tensor:
    """Return finite scores (N,) in float64."""
    checked = check_tensor(name, value)
    check_rows(name, checked, length)
    return validate.real(name, checked if checked.is_complex() else checked.double())


def check_k(k: object, most: int, why: str) -> int:
    """Return a number of neighbours from 1 to ``most``."""
    count = validate.count("k", k)
    if count > most:
        raise InputError("k", f"between 1 and {most}", k, why)
    return count
