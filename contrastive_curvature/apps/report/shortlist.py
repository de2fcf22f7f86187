"""The few inputs that are shown, chosen in one pass: the data may be larger than the memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from contrastive_curvature.apps.report.data import kept, previews

__all__ = ["Shortlist"]


class Shortlist:
    """The inputs with the largest scores so far.

    Args:
        size: How many to keep.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._found: list[tuple[float, int, Any]] = []

    def offer(self, scores: Tensor, first_row: int, x: Any) -> None:
        """Take the best of a batch.

        Args:
            scores: Shape (B,).
            first_row: Number of inputs before this batch.
            x: The inputs.
        """
        best = scores.argsort(descending=True, stable=True)[: self.size].tolist()
        shown = previews(x)
        pictures = None if shown is None else dict(enumerate(shown))
        new = [(float(scores[i]), first_row + i, None if pictures is None else kept(pictures[i])) for i in best]
        # Sorted by score and then by row, so that the choice does not depend on the batch size.
        self._found = sorted([*self._found, *new], key=lambda entry: (-entry[0], entry[1]))[: self.size]

    @property
    def rows(self) -> list[int]:
        """Positions in the data, the largest score first."""
        return [row for _, row, _ in self._found]

    @property
    def previews(self) -> list[Any]:
        """What the inputs look like, in the same order, ``None`` where that is not known."""
        return [preview for _, _, preview in self._found]
