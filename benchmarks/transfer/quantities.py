"""The few quantities of every input that rules are made of, and ways to combine them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.transfer.compact import Compact
from contrastive_curvature.embedding.known import Reference

__all__ = ["COMBINATIONS", "QUANTITIES", "WITH_VARIANCE", "Encoder", "Numbers", "columns", "log"]

Numbers = NDArray[np.float64]

QUANTITIES: dict[str, tuple[int, int, int]] = {
    "V": (1, 0, 0),
    "V/n": (1, -1, 0),
    "V/n^2": (1, -2, 0),
    "V/|phi|": (1, 0, -1),
    "V/|phi|^2": (1, 0, -2),
    "V/(n |phi|)": (1, -1, -1),
    "1/n": (0, -1, 0),
    "1/|phi|": (0, 0, -1),
}
"""Name -> exponents of the tangential variance V, the norm n of the raw output, and the norm |phi| of the features."""

WITH_VARIANCE = tuple(name for name, (of_variance, *_) in QUANTITIES.items() if of_variance)
"""Quantities that may be unusual on their lower side, too: an input may have less variance than all known ones."""


def _soft_max(z: Numbers) -> Numbers:
    # Several times faster than np.logaddexp.reduce, and there are thousands of rules.
    largest = z.max(1)
    total: Numbers = np.exp(2 * (z - largest[:, None])).sum(1)
    return largest + np.log(total) / 2


COMBINATIONS: dict[str, Callable[[Numbers], Numbers]] = {
    "max": lambda z: z.max(1),
    "soft max": _soft_max,
    "sum": lambda z: z.sum(1),
    "squares": lambda z: np.square(np.maximum(z, 0)).sum(1) + 1e-3 * z.sum(1),
}
"""Ways to combine standardised logarithms, shape (N, K). Squares of the positive parts: below all medians, the sum
decides."""


class Encoder:
    """One encoder's numbers, with the logarithms that many rules share.

    Args:
        name: Of its feature file.
        values: Its numbers.
    """

    def __init__(self, name: str, values: Compact) -> None:
        self.name, self.values = name, values
        self._logs: dict[str, dict[str, Numbers]] = {}

    def has(self, variance: str) -> bool:
        """Whether there is a variance of this name: an encoder of few features has no larger rank."""
        return variance in self.values["train"]

    def logs(self, variance: str) -> dict[str, Numbers]:
        """Set of inputs -> logarithms of V, n and |phi|, shape (N, 3)."""
        return {one: log(np.stack([v[variance], v["n"], v["phi"]], axis=1)) for one, v in self.values.items()}

    def standardised(self, variance: str) -> dict[str, Numbers]:
        """Set of inputs -> logarithms of all quantities, shape (N, 8), in the units of the training inputs."""
        if variance not in self._logs:
            exponents = np.array(list(QUANTITIES.values()), dtype=float).T
            logs = {one: v @ exponents for one, v in self.logs(variance).items()}
            train = torch.from_numpy(logs["train"])
            standard = Reference.of(train, train)
            location, scale = standard.location.numpy(), standard.scale.numpy()
            self._logs[variance] = {one: (v - location) / scale for one, v in logs.items()}
        return self._logs[variance]

    @cached_property
    def unknowns(self) -> list[str]:
        """Sets that are told from the test inputs."""
        return [name for name in self.values if name not in ("train", "test")]


def columns(names: tuple[str, ...]) -> list[int]:
    """Where quantities are in :meth:`Encoder.standardised`."""
    return [list(QUANTITIES).index(name) for name in names]


def log(value: Numbers) -> Numbers:
    """Logarithms; zero counts as the smallest normal number."""
    return np.log(np.maximum(value, np.finfo(np.float64).tiny))
