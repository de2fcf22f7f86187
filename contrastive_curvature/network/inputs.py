"""A batch of inputs: a tensor, or a mapping of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = ["Inputs", "check_inputs", "input_length", "slice_inputs"]

Inputs = Tensor | Mapping[str, Any]
"""A batch: a tensor whose first axis is the batch, or a mapping whose tensors all have that first axis."""


def check_inputs(x: object, argument: str = "x") -> Inputs:
    """Refuse what cannot be a batch of inputs.

    Args:
        x: The batch.
        argument: Name for the error message.

    Returns:
        The batch.

    Raises:
        InputTypeError: Neither a tensor nor a mapping, or a tensor that is not dense.
        InputError: No point in it.
    """
    wanted = "a tensor or a mapping of tensors, one point a row"
    if not isinstance(x, (Tensor, Mapping)):
        raise InputTypeError(expected(argument, wanted, f"a {type(x).__name__}"))
    for value in x.values() if isinstance(x, Mapping) else [x]:
        if isinstance(value, Tensor) and value.layout != torch.strided:
            hint = "Batches are cut into rows, which sparse tensors cannot be. Call .to_dense() on it."
            raise InputTypeError(expected(argument, "dense tensors", f"layout {value.layout}", hint))
    if not input_length(x):
        came = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else "a mapping without a tensor, or of no point"
        raise InputError(expected(argument, "a batch of at least one point", came))
    return x


def input_length(x: Inputs) -> int:
    """Number of points in a batch."""
    if isinstance(x, Mapping):
        return next((value.shape[0] for value in x.values() if isinstance(value, Tensor) and value.ndim), 0)
    return x.shape[0] if x.ndim else 0


def slice_inputs(x: Inputs, rows: slice) -> Inputs:
    """Some points of a batch."""
    if not isinstance(x, Mapping):
        return x[rows]
    n = input_length(x)
    return {k: v[rows] if isinstance(v, Tensor) and v.ndim and v.shape[0] == n else v for k, v in x.items()}
