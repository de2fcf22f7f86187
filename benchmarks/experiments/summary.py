"""Mean and deviation over the seeds of a row."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Summary = dict[str, float | int | None]
"""``mean``, ``std`` (of the sample, ``None`` for one value) and the number ``n`` of values."""


def summarize(values: Sequence[float | None]) -> Summary:
    """Mean and sample standard deviation over seeds.

    Args:
        values: One a seed; ``None`` where the figure is undefined, which does not count.

    Returns:
        The summary; its mean is ``None`` where nothing counts.
    """
    known = [value for value in values if value is not None]
    return {
        "mean": statistics.fmean(known) if known else None,
        "std": statistics.stdev(known) if len(known) > 1 else None,
        "n": len(known),
    }


def summarize_cells(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of a table from its cells: the seeds, and mean and deviation of every figure, score and time."""
    names = list(dict.fromkeys(name for cell in cells for name in cell["variants"]))
    return {
        "seeds": [cell["seed"] for cell in cells],
        "figures": _over([cell["figures"] for cell in cells]),
        "variants": {name: _over([cell["variants"].get(name, {}) for cell in cells]) for name in names},
        "seconds": _over([cell["seconds"] for cell in cells]),
    }


def _over(parts: list[dict[str, Any]]) -> dict[str, Summary]:
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: summarize([part.get(key) for part in parts]) for key in keys}
