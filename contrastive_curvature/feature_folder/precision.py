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
"""Part of the norm of a point's features that rounding may take away."""


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
            InputError: One is NaN or infinite, too large, or too small: rounding would take more than a hundredth of
                the norm of a point.
        """
        wide = features.detach().cpu()
        self._refuse_rows(wide, ~wide.isfinite(), first_row, "finite features", "NaN or infinity")
        rounded = wide.to(self.dtype)
        largest = torch.finfo(self.dtype).max
        wanted = f"features of at most {largest:.6g} in absolute value"
        self._refuse_rows(wide, ~rounded.isfinite(), first_row, wanted, f"{float(wide.abs().max()):.6g}")
        norm = torch.linalg.vector_norm(wide.double(), dim=1, keepdim=True)
        lost = torch.linalg.vector_norm(wide.double() - rounded.double(), dim=1, keepdim=True)
        wanted = "features that keep 99 % of their norm when they are rounded"
        smallest = float(wide.abs().max(1).values.min())
        received = f"features of which the largest is {smallest:.3g}"
        self._refuse_rows(wide, lost > _MOST_LOST * norm, first_row, wanted, received)
        bits = rounded.contiguous().view(torch.int16) if self.dtype is torch.bfloat16 else rounded.contiguous()
        return bits.numpy().view(self.stored.newbyteorder("=")).astype(self.stored, copy=False)

    def decode(self, stored: NDArray[Any]) -> Tensor:
        """What :meth:`encode` gave, lifted to float32 or float64; a copy."""
        native = np.array(stored, dtype=self.stored.newbyteorder("="))
        if self.dtype is torch.bfloat16:
            return torch.from_numpy(native.view(np.int16)).view(torch.bfloat16).to(self.lifted)
        return torch.from_numpy(native).to(self.lifted)

    def _refuse_rows(self, features: Tensor, bad: Tensor, first_row: int, wanted: str, received: str) -> None:
        rows = bad.any(dim=1).nonzero().flatten()
        if not len(rows):
            return
        finite = bool(features.isfinite().all())
        hint = {"float16": "Use dtype='bfloat16', of the same size, or 'float32'.", "float64": ""}.get(
            self.name, "Use dtype='float64'."
        )
        row = first_row + int(rows[0])
        shown = f"{received} in row {row} (counted from 0)"
        raise InputError(expected(f"dtype={self.name!r}", wanted, shown, hint if finite else "Look at that input."))


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
