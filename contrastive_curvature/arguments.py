"""Checks of arguments that many functions share."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputTypeError, expected

__all__ = ["check_dense", "check_flag"]


def check_flag(argument: str, value: object) -> None:
    """Refuse what is not ``True`` or ``False``: a string such as ``"no"`` would count as true.

    Raises:
        InputTypeError: It is something else.
    """
    if not isinstance(value, bool):
        raise InputTypeError(expected(argument, "True or False", f"a {type(value).__name__}"))


def check_dense(argument: str, value: Tensor) -> None:
    """Refuse a tensor that is not dense: a sparse one has neither rows to take nor comparisons.

    Raises:
        InputTypeError: It is not.
    """
    if value.layout != torch.strided:
        raise InputTypeError(expected(argument, "a dense tensor", f"layout {value.layout}", "Call .to_dense() on it."))
