"""What the arrays of a feature file must be."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature.errors import InputError, expected

__all__ = ["Floats", "Rows", "check_features", "check_floats", "check_range", "check_rows"]

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]


def check_floats(name: str, value: Any, axes: int) -> Floats:
    """Finite numbers as float32, in memory without gaps; refuse anything else, and arrays that are empty."""
    found = np.asarray(value)
    if found.dtype.kind not in "fiu":
        raise InputError(expected(name, "real numbers", f"an array of {found.dtype}"))
    if found.ndim != axes or 0 in found.shape:
        raise InputError(expected(name, f"{axes} axes, none of length 0", f"shape {found.shape}"))
    with np.errstate(over="ignore"):
        found = np.ascontiguousarray(found, dtype=np.float32)
    if not np.isfinite(found).all():
        wrong = int((~np.isfinite(found)).sum())
        raise InputError(expected(name, "finite numbers", f"{wrong} that are NaN or infinite in float32"))
    return found


def check_features(name: str, value: Any, width: int) -> Floats:
    """The same of shape (K, width)."""
    found = check_floats(name, value, 2)
    if found.shape[1] != width:
        wanted = f"shape (number of inputs, {width}), as weight has {width} columns"
        raise InputError(expected(name, wanted, f"shape {found.shape}"))
    return found


def check_rows(name: str, value: Any, count: int | None) -> Rows:
    """Whole numbers on one axis as int64, so many of them, or any number but none."""
    found = np.asarray(value)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        came = f"an array of {found.dtype}, shape {found.shape}"
        hint = "numpy.unique(names, return_inverse=True)[1] numbers names."
        raise InputError(expected(name, "whole numbers on one axis", came, hint))
    if len(found) == 0 or count not in (None, len(found)):
        wanted = "at least one" if count is None else f"{count}, one for each input"
        raise InputError(expected(name, wanted, f"{len(found)}"))
    return found.astype(np.int64)


def check_range(name: str, rows: Rows, count: int, of: str = "test") -> Rows:
    """Refuse row numbers beyond so many inputs; they are named after ``of`` in the message."""
    if rows.min() < 0 or rows.max() >= count:
        wanted = f"row numbers of the {count} {of} inputs"
        raise InputError(expected(name, wanted, f"{rows.min()} to {rows.max()}"))
    return rows
