"""Lines of a Markdown table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["head", "line"]


def head(cells: Sequence[str]) -> Iterator[str]:
    """The two lines that a table begins with."""
    yield line(cells)
    yield "|---" * len(cells) + "|"


def line(cells: Sequence[str]) -> str:
    """One line of a table."""
    return "| " + " | ".join(cells) + " |"
