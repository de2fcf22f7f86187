"""Identifiers of points: whole numbers, or texts of bounded length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = ["IN_ORDER", "GivenIdentifiers", "IdentifierType", "check_identifiers", "decode_identifiers"]

_INT64 = "<i8"

_MOST_BYTES = 4096


@dataclass(frozen=True)
class IdentifierType:
    """How identifiers are stored.

    Attributes:
        kind: ``"int64"`` or ``"text"``.
        bytes: Bytes of one; of texts those of the longest, in UTF-8.
    """

    kind: str
    bytes: int

    @property
    def stored(self) -> np.dtype[Any]:
        """NumPy's type of them."""
        return np.dtype(_INT64) if self.kind == "int64" else np.dtype(f"S{self.bytes}")


@dataclass(frozen=True)
class GivenIdentifiers:
    """Identifiers as they will be stored.

    Attributes:
        type: Of them.
        values: Of all points, in order; ``None`` numbers the points in the order of the loader.
    """

    type: IdentifierType
    values: NDArray[Any] | None

    def at(self, start: int, stop: int) -> NDArray[Any]:
        """Those of the points from ``start`` to before ``stop``.

        Raises:
            InputError: There are fewer identifiers than that.
        """
        if self.values is None:
            return np.arange(start, stop, dtype=_INT64)
        if stop > len(self.values):
            received = f"{len(self.values)} identifiers, and at least {stop} points"
            raise InputError(expected("identifiers", "one for each point of the loader", received))
        return self.values[start:stop]

    def check_number(self, n: int | None) -> None:
        """Refuse another number of identifiers than of points, where that is known.

        Raises:
            InputError: There are.
        """
        if self.values is not None and n is not None and len(self.values) != n:
            received = f"{len(self.values)} identifiers, and {n} points"
            raise InputError(expected("identifiers", "one for each point of the loader", received))


IN_ORDER = GivenIdentifiers(IdentifierType("int64", 8), None)
"""The numbers of the points in the order of the loader, counted from 0."""


def check_identifiers(value: Sequence[int] | Sequence[str] | NDArray[Any] | Tensor | None) -> GivenIdentifiers:
    """Take the identifiers that a user passes.

    Raises:
        InputTypeError: Neither whole numbers nor texts.
        InputError: Not on one axis, not different from each other, or texts that are too long or end in a zero byte.
    """
    if value is None:
        return IN_ORDER
    wanted = "whole numbers or texts, one for each point"
    if isinstance(value, (str, bytes)) or not (isinstance(value, (Sequence, Tensor)) or hasattr(value, "__array__")):
        raise InputTypeError(expected("identifiers", wanted, f"a {type(value).__name__}"))
    found = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if found.ndim != 1:
        raise InputError(expected("identifiers", wanted, f"shape {found.shape}"))
    if found.dtype.kind in "iu":
        if found.dtype == np.uint64 and len(found) and int(found.max()) > np.iinfo(np.int64).max:
            raise InputError(expected("identifiers", "whole numbers below 2^63", int(found.max())))
        numbers = found.astype(_INT64)
        _check_different(numbers)
        return GivenIdentifiers(IdentifierType("int64", 8), numbers)
    # NumPy turns a list of numbers and texts into texts.
    texts = [str(text) for text in value if isinstance(text, str)]
    if not len(found) or len(texts) != len(found):
        other = next((v for v in value if not isinstance(v, str)), None)
        raise InputTypeError(
            expected("identifiers", wanted, f"a {type(other).__name__} among them" if len(found) else "none")
        )
    return _texts(texts)


def decode_identifiers(stored: NDArray[Any], kind: IdentifierType) -> NDArray[Any]:
    """Whole numbers as they are, and texts as NumPy's ``str``."""
    return stored if kind.kind == "int64" else np.char.decode(stored, "utf-8")


def _texts(texts: list[str]) -> GivenIdentifiers:
    try:
        encoded = [text.encode("utf-8") for text in texts]
    except UnicodeEncodeError as error:
        raise InputError(expected("identifiers", "texts that UTF-8 can hold", repr(error.object)[:40])) from None
    longest = max(len(text) for text in encoded)
    if longest > _MOST_BYTES:
        raise InputError(expected("identifiers", f"texts of at most {_MOST_BYTES} bytes", f"{longest} bytes"))
    if any(text.endswith(b"\0") for text in encoded):
        raise InputError(expected("identifiers", "texts that do not end in a zero byte", "one that does"))
    values = np.array(encoded, dtype=f"S{max(1, longest)}")
    _check_different(values)
    return GivenIdentifiers(IdentifierType("text", max(1, longest)), values)


def _check_different(values: NDArray[Any]) -> None:
    ordered = np.sort(values)
    same = ordered[1:] == ordered[:-1]
    if bool(same.any()):
        twice = ordered[1:][same][0]
        shown = twice.decode("utf-8") if isinstance(twice, bytes) else int(twice)
        raise InputError(expected("identifiers", "a different one for each point", f"{shown!r} twice"))
