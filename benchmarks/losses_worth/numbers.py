"""Means of figures over encoders: first over those of one data set and trunk, then over these families."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["FIGURES", "Figure", "Spread", "by_encoder", "family", "mean_over_families", "rounded", "spread_of"]

Encoders = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Figure:
    """One figure of a posterior.

    Args:
        title: In tables.
        path: Keys of it in the results.
        better: 1 where larger is better, -1 where smaller is.
    """

    title: str
    path: tuple[str, ...]
    better: int = 1

    def of(self, found: Mapping[str, Any]) -> float | None:
        """Its value, or ``None`` where it is undefined."""
        value: Any = found
        for key in self.path:
            value = None if value is None else value.get(key)
        return None if value is None else float(value)


FIGURES = (
    Figure("`novelty`: AUROC", ("novelty", "auroc")),
    Figure("`uncertainty`: R-AUROC", ("uncertainty", "r_auroc")),
    Figure("AUSC", ("uncertainty", "ausc")),
    Figure("angle alone: AUROC", ("angle", "auroc")),
    Figure("R-AUROC", ("angle", "r_auroc")),
    Figure("AUSC", ("angle", "ausc")),
    Figure("votes: ECE", ("ece",), -1),
)
"""Columns of the tables: unknown inputs and wrong nearest neighbours, by the library's answers and by the posterior's
angle variance alone, and calibration."""


@dataclass(frozen=True)
class Spread:
    """Values of several encoders.

    Args:
        mean: Over families.
        least: Of the encoders.
        most: Of the encoders.
        count: Encoders.
    """

    mean: float
    least: float
    most: float
    count: int


def family(name: str) -> str:
    """Data set and trunk of an encoder: those that share both are not independent of each other."""
    return re.sub(r"-\d+-[a-z]+(-seed\d+)?$", "", name)


def by_encoder(encoders: Encoders, value: Callable[[Mapping[str, Any]], float | None]) -> dict[str, float]:
    """Name -> value, of the encoders that have one."""
    found = {name: value(encoder) for name, encoder in encoders.items()}
    return {name: number for name, number in found.items() if number is not None}


def mean_over_families(values: Mapping[str, float]) -> float:
    """Mean over families of the means of their encoders."""
    groups: dict[str, list[float]] = {}
    for name, value in values.items():
        groups.setdefault(family(name), []).append(value)
    return float(np.mean([np.mean(group) for group in groups.values()]))


def spread_of(values: Mapping[str, float]) -> Spread | None:
    """What a table says of the values; ``None`` without any."""
    if not values:
        return None
    numbers: Iterable[float] = values.values()
    return Spread(mean_over_families(values), min(numbers), max(numbers), len(values))


def rounded(value: Any) -> Any:
    """The same with four digits of every number."""
    if isinstance(value, Mapping):
        return {key: rounded(part) for key, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
