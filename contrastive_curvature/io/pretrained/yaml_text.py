"""The few forms of YAML that the front of a model card needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

__all__ = ["yaml_text"]


def yaml_text(value: dict[str, Any]) -> str:
    """A dictionary as YAML in block style.

    Args:
        value: Strings, numbers, lists and dictionaries, none of them empty. Keys are plain words.
    """
    return "\n".join(_lines(value, 0)) + "\n"


def _lines(value: Any, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if isinstance(value, dict):
        for key, part in value.items():
            if isinstance(part, (dict, list)):
                yield f"{indent}{key}:"
                yield from _lines(part, depth + 1)
            else:
                yield f"{indent}{key}: {_scalar(part)}"
        return
    for part in value:
        first, *rest = list(_lines(part, depth + 1)) if isinstance(part, (dict, list)) else [_scalar(part)]
        yield f"{indent}- {first.strip()}"
        yield from rest


def _scalar(value: str | float | bool) -> str:
    # A JSON string of ASCII is a double-quoted string of YAML, except that YAML has no surrogate pairs.
    text = json.dumps(value, ensure_ascii=False)
    # PyYAML refuses these, and takes a number without a point before its exponent for a string.
    escaped = "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
    if isinstance(value, float) and "e" in escaped and "." not in escaped:
        return escaped.replace("e", ".0e")
    return escaped
