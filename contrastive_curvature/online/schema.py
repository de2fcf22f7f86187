"""What saved content must look like, said in small checks that are put together."""

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
    "flag",
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
"""Python's whole numbers have no end, torch's have."""


class Flaw(Exception):
    """What is wrong with content, and where.

    Args:
        where: The path of keys to it.
        wanted: What is allowed.
        came: What was found.
    """

    def __init__(self, where: str, wanted: str, came: str) -> None:
        super().__init__(f"{where}: expected {wanted}, got {came}")
        self.where, self.wanted, self.came = where, wanted, came


def refuse(where: str, wanted: str, came: str) -> NoReturn:
    """Raise the flaw."""
    raise Flaw(where, wanted, came)


def fail(where: str, wanted: str, value: Any) -> NoReturn:
    """Raise the flaw, with the value in a few words."""
    if isinstance(value, Tensor):
        shown = f"a tensor {tuple(value.shape)} of {value.dtype}"
        if value.numel() == 1:
            shown += f", {value.item()}"
    else:
        shown = f"{str(value)[:60]!r}, a {type(value).__name__}"
    refuse(where, wanted, shown)


def anything(value: Any, where: str) -> None:
    """Accept all: another check has its turn later."""


def text(value: Any, where: str) -> None:
    """A string."""
    if type(value) is not str:
        fail(where, "a string", value)


def flag(value: Any, where: str) -> None:
    """``True`` or ``False``."""
    if type(value) is not bool:
        fail(where, "True or False", value)


def number(value: Any, where: str) -> None:
    """A finite number."""
    if type(value) not in (int, float) or not math.isfinite(value):
        fail(where, "a finite number", value)


def whole(least: int, most: int | None = None) -> Check:
    """A whole number in a range; ``True`` is none."""

    def check(value: Any, where: str) -> None:
        if type(value) is int and abs(value) > _LARGEST:
            fail(where, "a number of 64 bits", value)
        if type(value) is not int or value < least or (most is not None and value > most):
            wanted = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
            fail(where, wanted, value)

    return check


def nothing_or(inner: Check) -> Check:
    """``None``, or what the inner check takes."""

    def check(value: Any, where: str) -> None:
        if value is not None:
            inner(value, where)

    return check


def each(inner: Check, length: int | None = None, kind: type[list[Any]] | type[tuple[Any, ...]] = list) -> Check:
    """A list, or a tuple, of that length, all of whose items pass."""

    def check(value: Any, where: str) -> None:
        if type(value) is not kind or (length is not None and len(value) != length):
            size = "" if length is None else f" of {length} items"
            fail(where, f"a {kind.__name__}{size}", value)
        for place, item in enumerate(value):
            inner(item, f"{where}[{place}]")

    return check


def mapping(items: Mapping[str, Check]) -> Check:
    """A dictionary with exactly these keys."""

    def check(value: Any, where: str) -> None:
        if type(value) is not dict:
            fail(where, "a dictionary", value)
        same_keys(value, items, where)
        for name, inner in items.items():
            inner(value[name], _below(where, name))

    return check


def same_keys(value: Iterable[Any], wanted: Iterable[Any], where: str, more: bool = False) -> None:
    """Refuse keys that are missing, and unknown ones unless there may be ``more``."""
    missing = [name for name in wanted if name not in set(value)]
    unknown = [] if more else [name for name in value if name not in set(wanted)]
    if missing:
        refuse(_below(where, missing[0]), "an entry of that name", "none")
    if unknown:
        refuse(_below(where, unknown[0]), "no entry of that name", "one")


def tensor_like(present: Tensor, finite: bool, least: float | None = None) -> Check:
    """A tensor of the same shape and type, with finite numbers, and none below ``least``."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, Tensor) or value.shape != present.shape or value.dtype != present.dtype:
            fail(where, f"a tensor {tuple(present.shape)} of {present.dtype}", value)
        if finite and not bool(torch.isfinite(value).all()):
            refuse(where, "finite numbers", f"{int((~torch.isfinite(value)).sum())} that are not")
        if least is not None and bool((value < least).any()):
            refuse(where, f"numbers of at least {least:g}", f"{float(value.min())}")

    return check


def like(present: Any, strict: bool, signed: bool = False) -> Check:
    """What the same object has now, after other steps: the same keys and types, and numbers of the same kind.

    Args:
        present: What it has now.
        strict: Whether keys and lengths are the same too. Otherwise there may be more, as nobody knows the object.
        signed: Whether numbers may be negative where the present ones are not.
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
                like(item, strict, signed)(value[name], _below(where, name))
        elif isinstance(present, (list, tuple)) and strict:
            if len(value) != len(present):
                fail(where, f"{len(present)} items", value)
            for place, (one, item) in enumerate(zip(value, present, strict=True)):
                like(item, strict, signed)(one, f"{where}[{place}]")

    return check


_COUNTS = ("last_epoch", "_step_count", "step")


def _number_like(value: Any, present: float, where: str, signed: bool) -> None:
    # A learning rate of 1 becomes one of 0.5.
    if type(value) not in (int, float) or (math.isfinite(present) and not math.isfinite(value)):
        fail(where, "a finite number", value)
    if type(value) is int and abs(value) > _LARGEST:
        fail(where, "a number of 64 bits", value)
    if type(present) is int and type(value) is not int and any(where.endswith(f"[{name!r}]") for name in _COUNTS):
        fail(where, "a whole number", value)
    if present >= 0 > value and not signed:
        fail(where, "a number of at least 0", value)


def _below(where: str, name: Any) -> str:
    return f"{where}[{name!r}]"
