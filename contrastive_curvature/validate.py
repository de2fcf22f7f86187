"""Checks of public arguments: each returns the value, or raises an error that names the argument and its valid values.

Use as ``validate.count("k", k)``.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, to_install


def count(argument: str, value: object) -> int:
    """Return ``value`` if it is a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(argument, "a positive whole number", value)
    return value


def number(argument: str, value: object, *, positive: bool = False, signed: bool = False) -> float:
    """Return ``value`` if it is a finite number: not negative, or ``positive``, or of any sign if ``signed``."""
    wanted = "a finite number" + ("" if signed else " > 0" if positive else " >= 0")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputTypeError(argument, wanted, f"a {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or (number < 0 and not signed) or (positive and number == 0):
        raise InputError(argument, wanted, number)
    return number


def hyperparameter(argument: str, value: object, *, positive: bool = False, signed: bool = False) -> float | Tensor:
    """Return ``value`` as :func:`number` does; a tensor with one number and a gradient stays a tensor, shape ()."""
    if not isinstance(value, Tensor):
        return number(argument, value, positive=positive, signed=signed)
    if value.numel() != 1 or not value.is_floating_point():
        got = f"shape {tuple(value.shape)} of {value.dtype}"
        raise InputTypeError(argument, "a number, or a tensor with one", got)
    plain = number(argument, value.item(), positive=positive, signed=signed)
    if not value.requires_grad:
        return plain
    # A parameter stays one.
    return value.reshape(()) if value.ndim else value


def without_graph(value: float | Tensor) -> float:
    """Return a :func:`hyperparameter` as a plain number."""
    return value.item() if isinstance(value, Tensor) else value


def fraction(argument: str, value: object) -> float:
    """Return ``value`` if it is a number in (0, 1)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputTypeError(argument, "a number in (0, 1)", repr(value))
    if not 0 < value < 1:
        raise InputError(argument, "a number in (0, 1)", value)
    return float(value)


def choice(argument: str, value: object, known: tuple[str, ...]) -> None:
    """Refuse a value that is not one of the known strings."""
    if not isinstance(value, str) or value not in known:
        raise InputError(argument, "one of " + ", ".join(map(repr, known)), value)


def flag(argument: str, value: object) -> None:
    """Refuse anything but ``True`` and ``False``: Python would read the string ``"no"`` as true."""
    if not isinstance(value, bool):
        raise InputTypeError(argument, "True or False", f"a {type(value).__name__}")


def dense(argument: str, value: Tensor) -> None:
    """Refuse a tensor that is not dense: sparse tensors can be neither sliced by rows nor compared."""
    if value.layout != torch.strided:
        raise InputTypeError(argument, "a dense tensor", f"layout {value.layout}", "Call .to_dense() on it.")


def unmasked(argument: str, value: object) -> None:
    """Refuse a masked array, whose mask no conversion keeps."""
    if isinstance(value, np.ma.MaskedArray):
        hint = "Leave the masked points out: value.compressed(), or value.data of points that are whole."
        raise InputTypeError(argument, "an array without a mask", "a masked array", hint)


def device(argument: str, value: Tensor) -> None:
    """Refuse a tensor on a device without float64, which sums over points need."""
    if value.device.type == "mps":
        hint = "Apple's mps has no float64, in which sums over points are kept. Use the CPU, as with model.to('cpu')."
        raise UnsupportedError(argument, "a tensor on the CPU or a CUDA GPU", "one on mps", hint)


def tensor(
    argument: str, value: object, shape: tuple[int | str, ...] | None = None, like: Tensor | None = None
) -> Tensor:
    """Return ``value`` if it is a dense tensor of finite floating-point numbers.

    In ``shape``, a letter means any size. ``like`` sets the dtype and the device.
    """
    wanted = "any shape" if shape is None else f"shape ({', '.join(map(str, shape))})"
    if not isinstance(value, Tensor):
        raise InputTypeError(argument, f"a torch.Tensor, {wanted}", f"a {type(value).__name__}")
    dense(argument, value)
    if not value.is_floating_point():
        raise InputTypeError(argument, "a floating-point tensor", f"{value.dtype}", "Call .float() on it.")
    sizes = value.shape if shape is None else shape
    if len(sizes) != value.ndim or any(n != m for n, m in zip(sizes, value.shape, strict=True) if isinstance(n, int)):
        raise InputError(argument, wanted, f"shape {tuple(value.shape)}")
    if like is not None and (value.dtype, value.device) != (like.dtype, like.device):
        raise InputError(argument, f"{like.dtype} on {like.device}", f"{value.dtype} on {value.device}")
    bad = int((~value.detach().isfinite()).sum())
    if bad:
        raise InputError(argument, "finite numbers", f"{bad} of {value.numel()} NaN or infinite")
    return value


def real(argument: str, value: object) -> Tensor:
    """Return a ``value`` of any shape as :func:`tensor` does; half precision becomes float32."""
    checked = tensor(argument, value)
    return checked.float() if checked.dtype in (torch.float16, torch.bfloat16) else checked


def generator(generator: object, device: torch.device) -> None:
    """Refuse a random generator that torch cannot use on ``device``; ``None`` is accepted."""
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise InputTypeError("generator", "a torch.Generator or None", f"a {type(generator).__name__}")
    if generator.device.type != device.type:
        hint = f"Create it with torch.Generator({device.type!r})."
        raise InputError("generator", f"one on device {device.type}", f"one on {generator.device}", hint)


def package(argument: str, module: str, extra: str) -> Any:
    """Import an optional module for ``argument``; if its package is missing, the error says to install ``extra``."""
    name = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name:
            raise
        raise UnsupportedError(argument, f"the package {name}", "none installed", to_install(extra)) from None
