"""The precisions that features are saved in, and the refusal of features that one of them cannot hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = ["PRECISIONS", "TARGET_TYPES", "Precision", "parse_precision", "target_type"]

_MOST_LOST = 0.01
"""Rounding error of a feature, relative to the largest of its point, that is let pass."""


@dataclass(frozen=True)
class Precision:
    """How features are stored.

    Attributes:
        name: As users write it.
        dtype: torch's.
        stored: NumPy's, little-endian; ``bfloat16``, which NumPy does not know, as its 16 bits.
        lifted: What a batch is converted to when it is read.
    """

    name: str
    dtype: torch.dtype
    stored: np.dtype[Any]
    lifted: torch.dtype

    def encode(self, features: Tensor, first_row: int) -> NDArray[Any]:
        """Features (B, F) as they are stored.

        Args:
            features: Of any floating-point type, on any device.
            first_row: Number of the first of them in the data, for the error message.

        Raises:
            InputError: One is NaN or infinite, too large, or all features of a point are so small that rounding changes
                one by more than a hundredth of the largest.
        """
        wide = features.detach().cpu()
        if (row := _first(~wide.isfinite())) is not None:
            hint = "Look at that input."
            raise InputError(expected("loader", "finite features", _at("NaN or infinity", first_row + row), hint))
        rounded = wide.to(self.dtype)
        if rounded.dtype != wide.dtype:
            self._check_rounding(wide, rounded, first_row)
        bits = rounded.contiguous().view(torch.int16) if self.dtype is torch.bfloat16 else rounded.contiguous()
        return bits.numpy().view(self.stored.newbyteorder("=")).astype(self.stored, copy=False)

    def decode(self, stored: NDArray[Any]) -> Tensor:
        """What :meth:`encode` gave, lifted to float32 or float64; a copy."""
        native = np.array(stored, dtype=self.stored.newbyteorder("="))
        if self.dtype is torch.bfloat16:
            return torch.from_numpy(native.view(np.int16)).view(torch.bfloat16).to(self.lifted)
        return torch.from_numpy(native).to(self.lifted)

    def _check_rounding(self, wide: Tensor, rounded: Tensor, first_row: int) -> None:
        """Refuse features that this precision cannot hold."""
        hints = {"float16": "Use dtype='bfloat16', of the same size, or 'float32'."}
        argument, hint = f"dtype={self.name!r}", hints.get(self.name, "Use dtype='float64'.")
        if (row := _first(~rounded.isfinite())) is not None:
            wanted = f"features of at most {torch.finfo(self.dtype).max:.6g} in absolute value"
            received = _at(f"{float(wide[row].abs().max()):.6g}", first_row + row)
            raise InputError(expected(argument, wanted, received, hint))
        sizes = wide.abs().amax(dim=1, keepdim=True)
        if (row := _first((wide - rounded.to(wide.dtype)).abs() > _MOST_LOST * sizes)) is not None:
            wanted = "features that are rounded by less than a hundredth of the largest of their point"
            received = _at(f"a largest feature of {float(sizes[row]):.3g}", first_row + row)
            raise InputError(expected(argument, wanted, received, hint))


def _first(bad: Tensor) -> int | None:
    """The first row of a matrix with an entry that is true."""
    if not bool(bad.any()):
        return None
    return int(bad.any(dim=1).nonzero()[0])


def _at(received: str, row: int) -> str:
    return f"{received} in row {row} (counted from 0)"


def _precision(name: str, stored: str, lifted: torch.dtype = torch.float32) -> Precision:
    return Precision(name, getattr(torch, name), np.dtype(stored), lifted)


PRECISIONS = {
    "float16": _precision("float16", "<f2"),
    "bfloat16": _precision("bfloat16", "<u2"),
    "float32": _precision("float32", "<f4"),
    "float64": _precision("float64", "<f8", torch.float64),
}
"""Those that features can be saved in, by name."""

TARGET_TYPES = {
    "bool": "|b1",
    "uint8": "|u1",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
}
"""torch's types of targets, and how they are stored."""


def parse_precision(value: object) -> Precision:
    """``"float16"`` or ``torch.float16``, and so on.

    Raises:
        InputTypeError: Neither text nor a dtype.
        InputError: Another one.
    """
    wanted = "one of " + ", ".join(map(repr, PRECISIONS))
    if not isinstance(value, (str, torch.dtype)):
        raise InputTypeError(expected("dtype", wanted, f"a {type(value).__name__}"))
    name = str(value).removeprefix("torch.")
    if name not in PRECISIONS:
        raise InputError(expected("dtype", wanted, value))
    return PRECISIONS[name]


def target_type(targets: Tensor) -> str:
    """Name of the type that targets are stored in.

    Raises:
        InputTypeError: A type that is not stored, as complex numbers.
    """
    name = str(targets.dtype).removeprefix("torch.")
    if name not in TARGET_TYPES:
        raise InputTypeError(
            expected("loader", f"targets of one of the types {', '.join(TARGET_TYPES)}", str(targets.dtype))
        )
    return name
