"""Two random views of grey images, for a loss that has no labels: crops, small turns, mirroring, other contrasts."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from benchmarks.transfer.recipes.image_encoder import Images, make_inputs

__all__ = ["TwoViews"]

_SMALLEST = 0.6
"""Side of a crop over that of the image."""
_TURN = 15.0
"""Degrees."""
_JITTER = 0.4


class TwoViews:
    """Two views of each image by row number, drawn anew at each call.

    A view is a square crop of 0.6 to 1 of the side, turned by up to 15 degrees and scaled to the size of the image,
    with its contrast multiplied by 0.6 to 1.4 and its brightness shifted by up to 0.2. Outside of the image there is
    black.

    Args:
        images: Shape (N, H, W, C).
        seed: Of the views.
        mirrored: Whether half of the views are mirrored: clothes may be, letters may not.
    """

    def __init__(self, images: Images, seed: int, mirrored: bool) -> None:
        self.images, self.mirrored = images, mirrored
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, rows: Tensor) -> Tensor:
        """Views (2 B, C, H, W) of the images in these rows: the first of each, then the second of each."""
        pixels = make_inputs(self.images[rows.numpy()])
        return torch.cat([self._view(pixels), self._view(pixels)]).contiguous(memory_format=torch.channels_last)

    def _view(self, pixels: Tensor) -> Tensor:
        count = len(pixels)
        side = _SMALLEST + (1 - _SMALLEST) * self._draw(count)
        turn = math.radians(_TURN) * (2 * self._draw(count) - 1)
        # The crop stays inside the image, whose coordinates are from -1 to 1.
        shift = [(1 - side) * (2 * self._draw(count) - 1) for _ in range(2)]
        flip = torch.where(self._draw(count) < 0.5, -1.0, 1.0) if self.mirrored else torch.ones(count)
        cosine, sine = side * turn.cos(), side * turn.sin()
        matrix = torch.stack([flip * cosine, -sine, shift[0], flip * sine, cosine, shift[1]], dim=1)
        grid = affine_grid(matrix.view(count, 2, 3), list(pixels.shape), align_corners=False)
        seen = grid_sample(pixels, grid, align_corners=False)
        contrast = 1 + _JITTER * (2 * self._draw(count) - 1)
        brightness = _JITTER / 2 * (2 * self._draw(count) - 1)
        return (seen * contrast.view(-1, 1, 1, 1) + brightness.view(-1, 1, 1, 1)).clamp(0, 1)

    def _draw(self, count: int) -> Tensor:
        """Uniform numbers in [0, 1), shape (count,)."""
        return torch.rand(count, generator=self.generator)
