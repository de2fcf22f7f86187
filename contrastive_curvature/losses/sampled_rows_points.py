"""The points of a data set sorted by class, and a random bank of them that stands for all points of other classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = ["BankedPoints", "Candidates"]

_TOGETHER = 256
"""Points of small classes that are looked at together: one product instead of many small ones."""


@dataclass(frozen=True)
class Candidates:
    """Some points, and what they are to others.

    Args:
        u: Unit embeddings in float64, shape (C, D).
        place: Their places among all points sorted by class, shape (C,).
        index: Numbers of their classes, shape (C,).
        positives: Whether they are candidates as positives, those of other classes not counting; otherwise as
            negatives, those of the same class not counting.
    """

    u: Tensor
    place: Tensor
    index: Tensor
    positives: bool


class BankedPoints:
    """N points, sorted by class, and M of them as the bank.

    Args:
        u: Unit embeddings, shape (N, D).
        labels: Class labels, shape (N,).
        bank: Which points are the bank, int64, shape (M,).

    Attributes:
        index: Number of the class of every point, sorted, shape (N,).
        sizes: Number of points of every class, shape (C,).
        bank: The bank.
        weight: How many points of other classes one of the bank stands for, by class, float64, shape (C,); zero
            without another class.

    Raises:
        InputTypeError: ``labels`` or ``bank`` is no tensor of int64.
        InputError: A shape is wrong, an index is out of range, or the bank has no point of another class for some
            points that have one.
    """

    def __init__(self, u: Tensor, labels: Tensor, bank: Tensor) -> None:
        n = len(u)
        for name, given in (("labels", labels), ("bank", bank)):
            if not isinstance(given, Tensor) or given.dtype != torch.int64:
                came = str(given.dtype) if isinstance(given, Tensor) else f"a {type(given).__name__}"
                raise InputTypeError(expected(name, "a tensor of int64", came))
            if given.ndim != 1:
                raise InputError(expected(name, "one dimension", f"shape {tuple(given.shape)}"))
        if len(labels) != n:
            raise InputError(expected("labels", f"one label for each of the {n} points", f"{len(labels)} labels"))
        if len(bank) and not 0 <= int(bank.min()) <= int(bank.max()) < n:
            raise InputError(expected("bank", f"indices from 0 to {n - 1}", f"{int(bank.min())} to {int(bank.max())}"))
        self.classes, inverse, self.sizes = labels.unique(return_inverse=True, return_counts=True)
        order = inverse.argsort(stable=True)
        self._u, self._order, self.index = u, order, inverse[order]
        self._starts = self.sizes.cumsum(0) - self.sizes
        place = torch.empty_like(order).scatter_(0, order, torch.arange(n, device=u.device))
        self.bank = Candidates(self.wide(place[bank]), place[bank], inverse[bank], positives=False)
        there = n - self.sizes
        drawn = len(bank) - inverse[bank].bincount(minlength=len(self.classes))
        if bool(((there > 0) & (drawn == 0)).any()):
            few = labels[bank].unique().tolist()
            came = f"{len(bank)} points, " + (f"all of label {few[0]}" if few else "none of any label")
            hint = "Draw more points, or use negative_samples=None, which takes all negatives."
            wanted = "a sample with points of two labels or more, so that every point has a negative in it"
            raise InputError(expected("negative_samples", wanted, came, hint))
        self.weight = torch.where(there > 0, there.double() / drawn.clamp(min=1), 0.0)

    def wide(self, places: Tensor) -> Tensor:
        """Unit embeddings at some places in float64, of length one to its precision."""
        return unit(self._u[self._order[places]])

    def find(self, labels: Tensor) -> Tensor:
        """Numbers of the classes of some labels, each (B,).

        Raises:
            InputError: A label does not occur among the points.
        """
        index = torch.searchsorted(self.classes, labels).clamp(max=max(0, len(self.classes) - 1))
        unknown = self.classes[index] != labels if len(self.classes) else torch.ones_like(labels, dtype=torch.bool)
        if bool(unknown.any()):
            came = f"the new labels {labels[unknown].unique()[:5].tolist()} in the second"
            raise InputError(expected("train_loader", "the same data in every pass", came))
        return index

    def widest(self) -> int:
        """Points of the largest group of :meth:`groups`, or more."""
        return max(_TOGETHER, int(self.sizes.max())) if len(self.sizes) else 0

    def groups(self, index: Tensor) -> Iterator[tuple[Tensor, Candidates]]:
        """Points of some classes with all points of the same classes; small classes together.

        Args:
            index: Numbers of the classes of B points, shape (B,).

        Yields:
            Which of the B points, in rising order, and all N points of their classes as candidates.
        """
        order = index.argsort(stable=True)
        found, counts = index[order].unique_consecutive(return_counts=True)
        sizes = self.sizes[found].tolist()
        start = row = together = rows = 0
        for k, (size, count) in enumerate(zip(sizes, counts.tolist(), strict=True)):
            if k > start and together + size > _TOGETHER:
                yield self._group(order[row : row + rows], found[start:k])
                start, row, together, rows = k, row + rows, 0, 0
            together, rows = together + size, rows + count
        if sizes:
            yield self._group(order[row : row + rows], found[start:])

    def _group(self, rows: Tensor, classes: Tensor) -> tuple[Tensor, Candidates]:
        sizes = self.sizes[classes]
        before = sizes.cumsum(0) - sizes
        shift = (self._starts[classes] - before).repeat_interleave(sizes)
        place = shift + torch.arange(len(shift), device=shift.device)
        return rows.sort().values, Candidates(self.wide(place), place, self.index[place], positives=True)


def unit(u: Tensor) -> Tensor:
    """Unit embeddings (B, D) in float64, of length one to its precision."""
    wide = u.detach().double()
    return wide / wide.norm(dim=1, keepdim=True)
