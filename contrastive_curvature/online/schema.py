"""A schema of saved content, composed of small checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

__all__ = [
    "Check",
    "Flaw",
    "anything",
    "each",
    "fail",
    "like",
    "mapping",
    "nothing_or",
    "number",
    "refuse",
    "same_keys",
    "tensor_like",
    "text",
    "whole",
]

Check = Callable[[Any, str], None]
"""``check(value, where)`` raises :class:`Flaw`."""

_LARGEST = 2**63 - 1
"""Integers in Python have no limit; torch's have 64 bits."""


class Flaw(Exception):
    """A wrong entry of saved content.

    Args:
        where: The path of keys to the entry.
        wanted: What is allowed.
        received: What the entry is.
    """

    def __init__(self, where: str, wanted: str, received: str) -> None:
        super().__init__(f"{where}: expected {wanted}, got {received}")
        self.where, self.wanted, self.received = where, wanted, received


def refuse(where: str, wanted: str, received: str) -> NoReturn:
    """Raise a :class:`Flaw`."""
    raise Flaw(where, wanted, received)


def fail(where: str, wanted: str, value: Any) -> NoReturn:
    """Raise a :class:`Flaw` with a short description of the value."""
    if isinstance(value, Tensor):
        shown = f"a tensor {tuple(value.shape)} of {value.dtype}"
        if value.numel() == 1:
            shown += f", {value.item()}"
    else:
        shown = f"{str(value)[:60]!r}, a {type(value).__name__}"
    refuse(where, wanted, shown)


def anything(value: Any, where: str) -> None:
    """Accept every value, for entries that are checked elsewhere."""


def text(value: Any, where: str) -> None:
    """Check that the value is a string."""
    if type(value) is not str:
        fail(where, "a string", value)


def number(value: Any, where: str) -> None:
    """Check that the value is a finite number."""
    if type(value) not in (int, float) or not math.isfinite(value):
        fail(where, "a finite number", value)


def whole(least: int, most: int | None = None) -> Check:
    """Make a check for an int from ``least`` to ``most``; ``True`` and ``False`` are refused."""

    def check(value: Any, where: str) -> None:
        if type(value) is int and abs(value) > _LARGEST:
            fail(where, "a number of 64 bits", value)
        if type(value) is not int or value < least or (most is not None and value > most):
            wanted = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
            fail(where, wanted, value)

    return check


def nothing_or(inner: Check) -> Check:
    """Make a check that accepts ``None`` and whatever ``inner`` accepts."""

    def check(value: Any, where: str) -> None:
        if value is not None:
            inner(value, where)

    return check


def each(inner: Check, length: int | None = None, kind: type[list[Any]] | type[tuple[Any, ...]] = list) -> Check:
    """Make a check for a list (or a tuple) of the given length, all of whose items pass ``inner``."""

    def check(value: Any, where: str) -> None:
        if type(value) is not kind or (length is not None and len(value) != length):
            size = "" if length is None else f" of {length} items"
            fail(where, f"a {kind.__name__}{size}", value)
        for place, item in enumerate(value):
            inner(item, f"{where}[{place}]")

    return check


def mapping(items: Mapping[str, Check]) -> Check:
    """Make a check for a dictionary with exactly the keys of ``items``, whose values pass the checks in ``items``."""

    def check(value: Any, where: str) -> None:
        if type(value) is not dict:
            fail(where, "a dictionary", value)
        same_keys(value, items, where)
        for name, inner in items.items():
            inner(value[name], _path(where, name))

    return check


def same_keys(value: Iterable[Any], wanted: Iterable[Any], where: str, more: bool = False) -> None:
    """Refuse missing keys, and unknown keys unless ``more`` is true."""
    missing = [name for name in wanted if name not in set(value)]
    unknown = [] if more else [name for name in value if name not in set(wanted)]
    if missing:
        refuse(_path(where, missing[0]), "an entry of that name", "none")
    if unknown:
        refuse(_path(where, unknown[0]), "no entry of that name", "one")


def tensor_like(present: Tensor, finite: bool, least: float | None = None) -> Check:
    """Make a check for a tensor of the shape and dtype of ``present``, with no number below ``least``.

    Args:
        present: The tensor to compare with.
        finite: Whether NaN and infinity are refused.
        least: Smallest allowed number, or ``None``.
    """

    def check(value: Any, where: str) -> None:
        if not isinstance(value, Tensor) or value.shape != present.shape or value.dtype != present.dtype:
            fail(where, f"a tensor {tuple(present.shape)} of {present.dtype}", value)
        if finite and not bool(torch.isfinite(value).all()):
            refuse(where, "finite numbers", f"{int((~torch.isfinite(value)).sum())} that are not")
        if least is not None and bool((value < least).any()):
            refuse(where, f"numbers of at least {least:g}", f"{float(value.min())}")

    return check


def like(present: Any, strict: bool, signed: bool = False) -> Check:
    """Make a check for the state of an object after other steps: the same keys and types as its present state.

    Args:
        present: The present state of the object.
        strict: Whether keys and lengths must be equal. Otherwise more keys are allowed, for classes of other libraries.
        signed: Whether numbers may be negative if the present ones are not.
    """

    def check(value: Any, where: str) -> None:
        if present is None:
            if strict and value is not None:
                fail(where, "None", value)
            return
        if isinstance(present, Tensor):
            tensor_like(present, bool(torch.isfinite(present).all()))(value, where)
        elif type(present) in (int, float):
            _number_like(value, present, where, signed)
        elif type(value) is not type(present):
            fail(where, f"a {type(present).__name__}", value)
        elif isinstance(present, dict):
            same_keys(value, present, where, more=not strict)
            for name, item in present.items():
                like(item, strict, signed)(value[name], _path(where, name))
        elif isinstance(present, (list, tuple)) and strict:
            if len(value) != len(present):
                fail(where, f"{len(present)} items", value)
            for place, (one, item) in enumerate(zip(value, present, strict=True)):
                like(item, strict, signed)(one, f"{where}[{place}]")

    return check


_COUNTS = ("last_epoch", "_step_count", "step")


def _number_like(value: Any, present: float, where: str, signed: bool) -> None:
    # An int may become a float: a scheduler changes a learning rate of 1 to 0.5.
    if type(value) not in (int, float) or (math.isfinite(present) and not math.isfinite(value)):
        fail(where, "a finite number", value)
    if type(value) is int and abs(value) > _LARGEST:
        fail(where, "a number of 64 bits", value)
    if type(present) is int and type(value) is not int and any(where.endswith(f"[{name!r}]") for name in _COUNTS):
        fail(where, "a whole number", value)
    if present >= 0 > value and not signed:
        fail(where, "a number of at least 0", value)


def _path(where: str, name: Any) -> str:
    return f"{where}[{name!r}]"
