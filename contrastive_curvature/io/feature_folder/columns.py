"""What is stored of points: features in a precision, targets, and identifiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.io.feature_folder.header import TARGET_TYPES

_MOST_LOST = 0.01
"""Rounding error of a feature, relative to the largest of its point, that is let pass."""

_MOST_BYTES = 4096
"""Of an identifier."""


def encode(features: Tensor, dtype: str, first_row: int) -> NDArray[Any]:
    """Return features (B, F) as they are stored; refuse those that the precision cannot hold.

    ``first_row`` is the number of the first of them in the data.
    """
    wide = features.detach().cpu()
    if (row := _first(~wide.isfinite())) is not None:
        hint = "Look at that input."
        raise InputError("loader", "finite features", _at("NaN or infinity", first_row + row), hint)
    rounded = wide.to(getattr(torch, dtype)).contiguous()
    if rounded.dtype != wide.dtype:
        _check_rounding(wide, rounded, dtype, first_row)
    # NumPy does not know bfloat16.
    return rounded.view(torch.uint16).numpy() if dtype == "bfloat16" else rounded.numpy()


def decode(stored: NDArray[Any], dtype: str) -> Tensor:
    """Return what :func:`encode` gave as float32, or from float64 as float64; a copy."""
    features = as_tensor(stored)
    if dtype == "bfloat16":
        features = features.view(torch.bfloat16)
    return features.to(torch.float64 if dtype == "float64" else torch.float32)


def as_tensor(stored: NDArray[Any]) -> Tensor:
    """Return a copy in memory, in the byte order of the machine."""
    return torch.from_numpy(np.array(stored, dtype=stored.dtype.newbyteorder("=")))


def target_type(targets: Tensor) -> str:
    """Return the name of the type that targets are stored in."""
    name = str(targets.dtype).removeprefix("torch.")
    if name not in TARGET_TYPES:
        wanted = f"targets of one of the types {', '.join(TARGET_TYPES)}"
        raise InputTypeError("loader", wanted, str(targets.dtype))
    return name


def check_identifiers(value: Sequence[int] | Sequence[str] | NDArray[Any] | Tensor) -> NDArray[Any]:
    """Return the identifiers that a user gave as they are stored: int64, or texts in UTF-8."""
    wanted = "whole numbers or texts, one for each point"
    found = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if found.ndim != 1:
        raise InputError("identifiers", wanted, f"shape {found.shape}")
    if found.dtype.kind in "iu":
        if len(found) and int(found.max()) >= 2**63:
            raise InputError("identifiers", "whole numbers below 2^63", int(found.max()))
        stored = found.astype(np.int64)
    else:
        # NumPy turns a list of numbers and texts into texts.
        other = [each for each in value if not isinstance(each, str)]
        if other or not len(found):
            received = f"a {type(other[0]).__name__} among them" if other else "none"
            raise InputTypeError("identifiers", wanted, received)
        stored = _texts(list(value))
    different, counts = np.unique(stored, return_counts=True)
    if len(different) < len(stored):
        shown = decode_identifiers(different[counts > 1][:1]).item()
        raise InputError("identifiers", "a different one for each point", f"{shown!r} twice")
    return stored


def decode_identifiers(stored: NDArray[Any]) -> NDArray[Any]:
    """Return whole numbers as they are, and texts as NumPy's ``str``."""
    return np.char.decode(stored, "utf-8") if stored.dtype.kind == "S" else stored


def _texts(texts: list[Any]) -> NDArray[Any]:
    encoded = [text.encode() for text in texts]
    longest = max(map(len, encoded))
    if longest > _MOST_BYTES:
        raise InputError("identifiers", f"texts of at most {_MOST_BYTES} bytes", f"{longest} bytes")
    if any(text.endswith(b"\0") for text in encoded):
        # NumPy pads with them.
        raise InputError("identifiers", "texts that do not end in a zero byte", "one that does")
    return np.array(encoded)


def _check_rounding(wide: Tensor, rounded: Tensor, dtype: str, first_row: int) -> None:
    hint = "Use dtype='bfloat16', of the same size, or 'float32'." if dtype == "float16" else "Use dtype='float64'."
    sizes = wide.abs().amax(dim=1, keepdim=True)
    if (row := _first(~rounded.isfinite())) is not None:
        wanted = f"features of at most {torch.finfo(rounded.dtype).max:.6g} in absolute value"
        received = f"{float(sizes[row]):.6g}"
    elif (row := _first((wide - rounded.to(wide.dtype)).abs() > _MOST_LOST * sizes)) is not None:
        wanted = "features that are rounded by less than a hundredth of the largest of their point"
        received = f"a largest feature of {float(sizes[row]):.3g}"
    else:
        return
    raise InputError(f"dtype={dtype!r}", wanted, _at(received, first_row + row), hint)


def _first(bad: Tensor) -> int | None:
    """Return the first row of a matrix with an entry that is true."""
    rows = bad.any(dim=1).nonzero()
    return int(rows[0]) if len(rows) else None


def _at(received: str, row: int) -> str:
    return f"{received} in row {row} (counted from 0)"
