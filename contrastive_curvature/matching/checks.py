"""Input checks of the match probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.metrics._checks import check_tensor

__all__ = ["check_dim", "check_same", "read_whole", "result_dtype"]


def result_dtype(embeddings: EmbeddingDistribution | Tensor) -> torch.dtype:
    """The dtype of probabilities: that of the embeddings, float32 for half precision."""
    dtype = (embeddings if isinstance(embeddings, Tensor) else embeddings.raw_mean).dtype
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def check_dim(name: str, now: int, fitted: int) -> None:
    """Refuse embeddings of another dimension than those of the fit.

    Raises:
        InputError: It is another.
    """
    if now != fitted:
        raise InputError(expected(name, f"D = {fitted}, that of the fit", f"D = {now}"))


def check_same(same: object, length: int) -> Tensor:
    """Return the outcomes of pairs as bool, shape (length,).

    Raises:
        InputTypeError: Not a tensor of bools or integers.
        InputError: Another shape, or other integers than 0 and 1.
    """
    checked = check_tensor("same", same)
    if checked.is_floating_point() or checked.is_complex():
        raise InputTypeError(expected("same", "a bool tensor, or integers 0 and 1", str(checked.dtype)))
    if tuple(checked.shape) != (length,):
        raise InputError(expected("same", f"shape ({length},)", f"shape {tuple(checked.shape)}"))
    if not bool(((checked == 0) | (checked == 1)).all()):
        hint = "Classes go into fit_retrieval; here, pass labels_a == labels_b."
        raise InputError(expected("same", "a bool tensor, or integers 0 and 1", "other integers", hint))
    return checked.bool()


def read_whole(state: Mapping[str, Any], key: str) -> int:
    """Return a positive whole number of a saved state.

    Raises:
        InputError: It is missing or something else.
    """
    value = state.get(key)
    if type(value) is not int or value < 1:
        raise InputError(expected(f"state_dict[{key!r}]", "a positive whole number", value))
    return value
