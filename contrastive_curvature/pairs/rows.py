"""Points kept from a stream: all points, or a uniform sample that does not depend on the division of the data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from contrastive_curvature.errors import InputError

_T = TypeVar("_T")

_CELL = 2.0**-8
"""Width of what counts as equal outputs, relative to their norm."""

_MOST_ALIKE = 20
"""One in so many rows of a sample has the same number, or an input that repeats could be most of it. More of them are
taken where there are too few others."""

_INCREMENT, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def point_keys(numbers: Tensor, seed: int = 0) -> Tensor:
    """Return a pseudo-random key for each point's number; different numbers have different keys.

    The points with the smallest keys are a uniform sample without replacement. The sample depends only on the numbers,
    not on the parts and the order of the stream.

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    with np.errstate(over="ignore"):
        x = numbers.detach().cpu().numpy().astype(np.uint64)
        x = x + np.uint64((_INCREMENT * (2 * seed + 1)) % 2**64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
        x = x ^ (x >> np.uint64(31))
    return torch.from_numpy(x.view(np.int64).copy())


def content_numbers(outputs: Tensor) -> Tensor:
    """Compute a number for each raw output (n, D) from its content alone, not its order or batch; shape (n,).

    Eight projections of the direction and the logarithm of the norm are rounded. The rounding is coarse: if float32
    outputs are computed again in batches of another size, about one in a thousand changes its number. The rounding is
    also fine: different inputs rarely share a number, even in tight classes. The numbers are on the outputs' device.
    """
    directions, odd = _projections(outputs.shape[1], outputs.device)
    wide = outputs.detach().double()
    norm = wide.norm(dim=1, keepdim=True)
    found = torch.cat([wide @ directions / norm, norm.log()], dim=1)
    return ((found / _CELL).round().to(torch.int64) * odd).sum(1)


@functools.cache
def _projections(dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return directions (D, 8) and odd numbers (9,), the same in every process."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(dim, 8, generator=generator, dtype=torch.float64, device="cpu")
    odd = torch.randint(-(2**62), 2**62, (9,), generator=generator, device="cpu") * 2 + 1
    return directions.to(device), odd.to(device)


@dataclass(frozen=True)
class Rows:
    """Points that were kept.

    Args:
        size: Largest number of kept points; ``None`` for all.
        numbers: Numbers of the points, int64 on the CPU, shape (m,); all different, or from :func:`content_numbers`.
        columns: Values of the points by name, each of shape (m, ...); empty without points.
        seed: Seed of the sample, see :func:`point_keys`.
    """

    size: int | None
    numbers: Tensor
    columns: dict[str, Tensor]
    seed: int = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def merged(self, other: Rows) -> Rows:
        """Return the points that the two streams, joined into one, would keep."""
        if not len(other):
            return self
        if not len(self):
            return other
        return _joined([self, other], self.size, self.seed)._smallest()

    def to(self, device: torch.device) -> Rows:
        """Move the columns to a device."""
        return replace(self, columns={name: part.to(device) for name, part in self.columns.items()})

    def in_order(self) -> Rows:
        """Sort the points by their numbers."""
        if bool((self.numbers[1:] > self.numbers[:-1]).all()):
            return self
        return self._at(self.numbers.argsort())

    def subsample(self, size: int) -> Rows:
        """Cut the sample down to ``size`` points: the points that a sample of this size would have kept."""
        return Rows(size, self.numbers, self.columns, self.seed)._smallest()

    def _smallest(self) -> Rows:
        if self.size is None or len(self) <= self.size:
            return self
        keys, order = point_keys(self.numbers, self.seed).sort(stable=True)
        return self._at(order[_turns(keys, self.size).argsort(stable=True)[: self.size]])

    def _at(self, places: Tensor) -> Rows:
        columns = {name: part[places.to(part.device)] for name, part in self.columns.items()}
        return Rows(self.size, self.numbers[places], columns, self.seed)


class RowCollector:
    """Collects :class:`Rows` from batches.

    Args:
        size: Largest number of kept points; ``None`` for all.
        seed: See :func:`point_keys`.
    """

    def __init__(self, size: int | None, seed: int = 0) -> None:
        self._kept = Rows(size, torch.zeros(0, dtype=torch.int64, device="cpu"), {}, seed)
        self._waiting: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._count = 0

    def add(self, numbers: Tensor, columns: dict[str, Tensor]) -> None:
        """Add a batch of points with their numbers (n,), on any device."""
        size = self._kept.size
        if size == 0:
            return
        # A view would keep the whole batch in memory.
        self._waiting.append((numbers.detach(), {name: part.detach().clone() for name, part in columns.items()}))
        self._count += len(numbers)
        if size is not None and self._count >= size:
            self._kept = self.rows()

    def rows(self) -> Rows:
        """Return the points kept so far."""
        if self._waiting:
            numbers, columns = zip(*self._waiting, strict=True)
            # The numbers of many batches together, because a GPU would be waited for each time.
            on_cpu = torch.cat(numbers).cpu().split([len(part) for part in numbers])
            batches = zip(on_cpu, columns, strict=True)
            new = [replace(self._kept, numbers=part, columns=named) for part, named in batches]
            parts = [self._kept, *new] if len(self._kept) else new
            self._kept = _joined(parts, self._kept.size, self._kept.seed)._smallest()
            self._waiting, self._count = [], 0
        return self._kept


def _turns(keys: Tensor, size: int) -> Tensor:
    """Return each point's turn in a sample, from ascending keys (m,); a turn takes few points of one key."""
    return (torch.arange(len(keys), device="cpu") - torch.searchsorted(keys, keys)) // max(1, size // _MOST_ALIKE)


def united(first: Mapping[str, _T], second: Mapping[str, _T], merge: Callable[[_T, _T], _T]) -> dict[str, _T]:
    """Unite two mappings; the values of a shared key are merged."""
    out = dict(first)
    for name, part in second.items():
        out[name] = merge(out[name], part) if name in out else part
    return out


def _joined(parts: list[Rows], size: int | None, seed: int) -> Rows:
    # A column that only some points have is dropped, because its values could not be matched to points.
    first = {name: column for name, column in parts[0].columns.items() if all(name in rows.columns for rows in parts)}
    for name, column in first.items():
        other = next((rows for rows in parts if rows.columns[name].shape[1:] != column.shape[1:]), None)
        if other is not None:
            wanted = f"one shape for every point, {tuple(column.shape[1:])} as in the first batch"
            hint = "Points are kept, which takes the same of each: pad all batches to one length."
            raise InputError(f"loader: {name}", wanted, f"{tuple(other.columns[name].shape[1:])}", hint)
    columns = {name: torch.cat([rows.columns[name].to(part) for rows in parts]) for name, part in first.items()}
    return Rows(size, torch.cat([rows.numbers for rows in parts]), columns, seed)
