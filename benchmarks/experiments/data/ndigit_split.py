"""Images of several digits of MNIST, kept as the numbers of the digits and put together when they are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.experiments.data.split import Split

__all__ = ["SIDE", "NDigitSplit"]

SIDE = 28
"""Of a digit, in pixels."""


class NDigitSplit(Split):
    """Images of N digits, put together when they are asked for.

    Args:
        digits: The digit images that they are made of, uint8 (M, 28, 28).
        rows: Which of these stand in each image, from left to right, int64 (n, N).
        patches: The black square on each of them: side, top row and left column in pixels, int64 (n, N, 3). A side of
            0 is no square.
        targets: The number that each image shows, int64 (n,).
    """

    def __init__(self, digits: Tensor, rows: Tensor, patches: Tensor, targets: Tensor) -> None:
        self.digits, self.rows, self.patches, self.targets = digits, rows, patches, targets

    def pixels(self, rows: Sequence[int]) -> Tensor:
        """Some images, uint8, shape (B, 1, 28, 28 N)."""
        chosen = torch.as_tensor(rows, dtype=torch.long)
        side, top, left = self.patches[chosen][..., None].unbind(2)  # each (B, N, 1)
        across = torch.arange(SIDE)
        in_rows = (across >= top) & (across < top + side)
        in_columns = (across >= left) & (across < left + side)
        tiles = self.digits[self.rows[chosen]].masked_fill(in_rows[..., :, None] & in_columns[..., None, :], 0)
        return tiles.transpose(1, 2).reshape(len(chosen), 1, SIDE, -1)

    def images(self, rows: Sequence[int]) -> Tensor:
        """In [0, 1], see :meth:`Split.images`."""
        return self.pixels(rows).float() / 255

    def fingerprint(self) -> str:
        """See :meth:`Split.fingerprint`."""
        found = hashlib.sha256()
        for part in (self.targets, self.rows, self.patches, self.digits):
            found.update(part.numpy().tobytes())
        return found.hexdigest()

    def take(self, rows: Tensor) -> NDigitSplit:
        """See :meth:`Split.take`."""
        return NDigitSplit(self.digits, self.rows[rows], self.patches[rows], self.targets[rows])
