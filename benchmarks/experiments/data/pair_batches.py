"""Batches of pairs, half of them of one class: of many classes, two random images are hardly ever of one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from contrastive_curvature.errors import InputError, expected

__all__ = ["PairBatches"]


class PairBatches(Sampler[list[int]]):
    """Batches of pairs of images, exactly half of them of one class and half of two.

    A batch is a list of ``2 * pairs`` rows; rows ``2 i`` and ``2 i + 1`` are a pair, and the pairs stand in random
    order. In both halves the first image of a pair is drawn from all images that have a partner, the second from all
    partners: the other images of its class, or all images of other classes.

    For torch's ``DataLoader(..., batch_sampler=...)``.

    Args:
        targets: Class labels, int64 (N,).
        pairs: Pairs in a batch, an even number, at least 2.
        batches: Batches in an epoch, at least 1.
        generator: Source of the draws, on the CPU.

    Raises:
        InputError: A number is out of range, no class has two images, or there is only one class.
    """

    def __init__(self, targets: Tensor, pairs: int, batches: int, generator: torch.Generator) -> None:
        if isinstance(pairs, bool) or not isinstance(pairs, int) or pairs < 2 or pairs % 2:
            raise InputError(expected("pairs", "an even number, at least 2", pairs))
        if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1:
            raise InputError(expected("batches", "a positive whole number", batches))
        if targets.ndim != 1 or targets.is_floating_point():
            came = f"{targets.dtype} of shape {tuple(targets.shape)}"
            raise InputError(expected("targets", "class labels, int64 of shape (N,)", came))
        _, kinds, counts = targets.unique(return_inverse=True, return_counts=True)
        if len(counts) < 2:
            raise InputError(expected("targets", "at least two classes", f"{len(counts)}"))
        if int(counts.max()) < 2:
            raise InputError(expected("targets", "two images of one class", "no class with more than one"))
        self.pairs, self.batches, self.generator = pairs, batches, generator
        # Places in an order that has one class after the other: a class is an interval.
        self._order = kinds.argsort(stable=True)
        self._count = counts[kinds[self._order]]
        self._start = (counts.cumsum(0) - counts)[kinds[self._order]]
        self._with_partner = torch.nonzero(self._count > 1).squeeze(1)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        everyone = torch.arange(len(self._order))
        for _ in range(self.batches):
            first = torch.cat([self._draw(self._with_partner), self._draw(everyone)])
            start, count = self._start[first], self._count[first]
            matching = torch.arange(self.pairs) < self.pairs // 2
            # Steps forward, at least one and less than a full turn: inside the class, or past it.
            turn = torch.where(matching, count, len(self._order))
            skipped = torch.where(matching, 1, start + count - first)
            steps = skipped + self._below(torch.where(matching, count - 1, len(self._order) - count))
            second = torch.where(matching, start + (first - start + steps) % turn, (first + steps) % turn)
            both = self._order[torch.stack([first, second], 1)]
            yield both[torch.randperm(self.pairs, generator=self.generator)].flatten().tolist()

    def _draw(self, places: Tensor) -> Tensor:
        return places[torch.randint(len(places), (self.pairs // 2,), generator=self.generator)]

    def _below(self, bounds: Tensor) -> Tensor:
        """A whole number from 0 to each bound, without the bound."""
        return (torch.rand(bounds.shape, dtype=torch.float64, generator=self.generator) * bounds).long()
