"""Which points are anchors and which are their candidates: all of one tower, or those of the other of two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.pairs.relation import BLOCK_ELEMENTS, Relation

__all__ = ["Side", "Sides"]


@dataclass(frozen=True)
class Side:
    """One direction: a range of points that are anchors, and one of their candidates.

    Args:
        anchors: Among all N points.
        candidates: The same.
        negative_share: How much a negative counts.
    """

    anchors: slice
    candidates: slice
    negative_share: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers A of anchors and M of candidates."""
        return self.anchors.stop - self.anchors.start, self.candidates.stop - self.candidates.start

    def row_blocks(self, width: int = 1) -> Iterator[tuple[int, int]]:
        """Ranges of anchors, counted from the first one, in blocks of bounded size.

        Args:
            width: How many numbers the caller stores for every pair.
        """
        count, candidates = self.shape
        step = max(1, BLOCK_ELEMENTS // max(1, candidates * width))
        for start in range(0, count, step):
            yield start, min(start + step, count)

    def related(
        self, relation: Relation, start: int, stop: int, dtype: torch.dtype, columns: slice | None = None
    ) -> tuple[Tensor, Tensor]:
        """How often candidates count as positives and as negatives, each (stop - start, C).

        Args:
            relation: Of all N points.
            start: First anchor, counted from the first of this side.
            stop: One past the last.
            dtype: Of the numbers.
            columns: Some of the candidates, counted from the first of this side; ``None`` for all.
        """
        first = self.candidates.start
        chosen = self.candidates if columns is None else slice(first + columns.start, first + columns.stop)
        rows = self.anchors.start + start, self.anchors.start + stop
        positive, negative = relation.rows(*rows, chosen)
        repels = negative.to(dtype)
        return positive.to(dtype), repels if self.negative_share == 1 else self.negative_share * repels


@dataclass(frozen=True)
class Sides:
    """All directions of a loss.

    Args:
        all: Each point is an anchor in at most one of them, and a candidate in at most one.
    """

    all: tuple[Side, ...]

    @classmethod
    def one_tower(cls, n: int, negative_share: float = 1.0) -> Sides:
        """Every point is an anchor, and a candidate of all others."""
        return cls((Side(slice(0, n), slice(0, n), negative_share),))

    @classmethod
    def two_towers(cls, first: int, n: int, directions: str = "both") -> Sides:
        """Points of one tower are the candidates of the other.

        Args:
            first: How many of the N points are of tower a.
            n: N.
            directions: Which tower has the anchors: ``"both"``, ``"a"`` or ``"b"``.
        """
        a, b = slice(0, first), slice(first, n)
        sides = {"a": Side(a, b), "b": Side(b, a)}
        return cls((sides["a"], sides["b"]) if directions == "both" else (sides[directions],))

    def __iter__(self) -> Iterator[Side]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)
