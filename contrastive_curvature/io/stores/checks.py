"""Input checks of the vector stores."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected

__all__ = ["Ids", "check_ids", "check_options", "need"]

Ids = NDArray[Any]
"""Identifiers: an int64 array, or an object array of strings."""

_WANTED = "whole numbers (an int tensor, array or list) or a list of strings"


def need(package: str, store: str, extra: str) -> ModuleType:
    """Import an optional package.

    Args:
        package: Its name.
        store: The class that needs it.
        extra: The extra of this library that brings it.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        hint = f"pip install 'contrastive-curvature[{extra}]'."
        raise UnsupportedError(expected(store, f"the package {package}", "none installed", hint)) from None


def check_ids(ids: object, count: int | None = None) -> Ids:
    """Return identifiers as an int64 array or an object array of strings.

    Args:
        ids: Whole numbers or strings.
        count: How many there must be.

    Raises:
        InputTypeError: They are something else, or both.
        InputError: There are more or fewer than ``count``, or an identifier stands twice.
    """
    out = _as_array(ids)
    if count is not None and len(out) != count:
        raise InputError(expected("ids", f"{count}, one for each embedding", len(out)))
    values, counts = np.unique(out, return_counts=True)
    if len(values) < len(out):
        twice = values[counts > 1][:5].tolist()
        raise InputError(expected("ids", "identifiers that are all different", f"{twice} more than once"))
    return out


def _as_array(ids: object) -> Ids:
    if isinstance(ids, Tensor):
        ids = ids.detach().cpu().numpy()
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1:
            raise InputError(expected("ids", "shape (N,)", f"shape {ids.shape}"))
        if ids.dtype.kind in "iu":
            if ids.dtype == np.uint64 and ids.size and int(ids.max()) > np.iinfo(np.int64).max:
                raise InputError(expected("ids", "numbers that int64 can hold", int(ids.max())))
            return ids.astype(np.int64)
        if ids.dtype.kind not in "UO":
            raise InputTypeError(expected("ids", _WANTED, f"dtype {ids.dtype}"))
        ids = ids.tolist()
    if isinstance(ids, str) or not isinstance(ids, Sequence | range):
        raise InputTypeError(expected("ids", _WANTED, f"a {type(ids).__name__}"))
    kinds = {type(value) for value in ids}
    if kinds <= {str}:
        return _strings(ids)
    if any(not issubclass(kind, int | np.integer) or kind is bool for kind in kinds):
        raise InputTypeError(expected("ids", _WANTED, "a list of " + ", ".join(sorted(k.__name__ for k in kinds))))
    try:
        return np.array(list(ids), dtype=np.int64)
    except OverflowError:
        raise InputError(expected("ids", "numbers that int64 can hold", max(ids, key=abs))) from None


def _strings(ids: Sequence[Any]) -> Ids:
    out = np.empty(len(ids), dtype=object)
    out[:] = list(ids)
    for value in ids:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InputError(expected("ids", "strings that UTF-8 can hold", value)) from None
    return out


def check_options(kind: str, given: dict[str, int], known: tuple[str, ...]) -> None:
    """Refuse options that an index does not have, and values that are no positive whole numbers.

    Raises:
        InputError: An option is unknown or has another value.
    """
    for name, value in given.items():
        if name not in known:
            wanted = f"{kind!r} with {', '.join(known)}" if known else f"{kind!r} without options"
            raise InputError(expected("create_index", wanted, name))
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(expected(name, "a positive whole number", value))
