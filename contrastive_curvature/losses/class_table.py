"""Number of points and sum of embeddings for every class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature import waiting
from contrastive_curvature.hessian.sphere import normalize

_CHUNK_ROWS = 2**16
"""Points that are held in float64 at once."""

_WAITING = 2**20
"""Numbers that wait at least, before they are added to the sums: 8 MiB."""


@dataclass(frozen=True)
class ClassTable:
    """Sums over the points of every class.

    Args:
        labels: Class labels, each once, ascending, int64, shape (C,).
        counts: Number of points of each class, int64, shape (C,).
        sums: Sum of each class's unit embeddings, float64, shape (C, D).
    """

    labels: Tensor
    counts: Tensor
    sums: Tensor

    @classmethod
    def of(cls, outputs: Tensor, labels: Tensor, *, unit: bool = False) -> ClassTable:
        """Make the table of outputs (N, D) with labels (N,); ``unit`` marks outputs that are already unit vectors."""
        device = outputs.device
        found = labels.unique(return_inverse=True, return_counts=True)
        kinds, inverse, counts = (waiting.sent(part, device) for part in found)
        sums = torch.zeros(len(kinds), outputs.shape[1], dtype=torch.float64, device=device)
        for rows, index in zip(outputs.split(_CHUNK_ROWS), inverse.split(_CHUNK_ROWS), strict=True):
            sums.index_add_(0, index, (rows if unit else normalize(rows)[0]).double())
        return cls(kinds, counts, sums)

    def to(self, device: torch.device) -> ClassTable:
        """Move the table to a device."""
        return ClassTable(self.labels.to(device), self.counts.to(device), self.sums.to(device))

    def merged(self, *others: ClassTable | None) -> ClassTable:
        """Return the table of the points of all these tables."""
        parts = [self, *(other for other in others if other is not None)]
        if len(parts) == 1:
            return self
        device = self.labels.device
        labels, inverse = torch.cat([part.labels.to(device) for part in parts]).unique(return_inverse=True)
        counts = torch.cat([part.counts.to(device) for part in parts])
        sums = torch.cat([part.sums.to(device) for part in parts])
        return ClassTable(
            labels,
            torch.zeros(len(labels), dtype=torch.int64, device=device).index_add_(0, inverse, counts),
            sums.new_zeros(len(labels), sums.shape[1]).index_add_(0, inverse, sums),
        )


class ClassTableCollector:
    """Makes a :class:`ClassTable` from batches."""

    def __init__(self) -> None:
        # The first part is the sum so far; the others wait, with ``_waiting`` numbers in all.
        self._parts: list[ClassTable] = []
        self._waiting = 0

    def add(self, outputs: Tensor, labels: Tensor, *, unit: bool = False) -> None:
        """Add outputs with class labels; arguments as in :meth:`ClassTable.of`."""
        self._parts.append(ClassTable.of(outputs, labels, unit=unit))
        self._waiting += self._parts[-1].sums.numel()
        # Merge only as many numbers as the sum has already, or every batch would visit all classes.
        if self._waiting >= max(_WAITING, self.size):
            self._parts, self._waiting = [self._parts[0].merged(*self._parts[1:])], 0

    @property
    def size(self) -> int:
        """Return the number of entries in the sums so far, a lower bound."""
        return self._parts[0].sums.numel() if self._parts else 0

    def table(self) -> ClassTable | None:
        """Return the table of all added points; ``None`` without any."""
        return self._parts[0].merged(*self._parts[1:]) if self._parts else None
