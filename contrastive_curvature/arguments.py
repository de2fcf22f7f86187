"""Checks of arguments that many functions share."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = ["check_count", "check_dense", "check_flag", "check_generator"]


def check_count(argument: str, value: object) -> int:
    """Return a positive whole number.

    Raises:
        InputError: Something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(expected(argument, "a positive whole number", value))
    return value


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


def check_generator(generator: object, device: torch.device) -> None:
    """Refuse a source of randomness that torch would refuse, or another device's.

    Raises:
        InputTypeError: Not a ``torch.Generator``.
        InputError: One of another device.
    """
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise InputTypeError(expected("generator", "a torch.Generator or None", f"a {type(generator).__name__}"))
    if generator.device.type != device.type:
        hint = f"Make it with torch.Generator({device.type!r})."
        raise InputError(expected("generator", f"one on device {device.type}", f"one on {generator.device}", hint))
