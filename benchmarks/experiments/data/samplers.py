"""Batches that hold several images of each place: drawn at random, two of a million images are never of one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor
from torch.utils.data import Sampler

from contrastive_curvature.errors import InputError, expected


class PlaceSampler(Sampler[int]):
    """Groups of images within a radius of a common one, in a new order each time.

    An epoch has ``N // per_place`` groups. Their first images are drawn without replacement from those that have
    ``per_place`` images around them, themselves among these (again from all of them where that is not enough), the
    others of a group from the first one's surroundings. Where no image has that many, those with another one near it
    take part, and some images come twice.

    Args:
        positions: In metres, shape (N, 2).
        radius: In metres.
        per_place: Images in a group, at least 2.
        generator: Source of the order.

    Raises:
        InputError: No two images are that near, or ``per_place`` is out of range.
    """

    def __init__(self, positions: Tensor, radius: float, per_place: int, generator: torch.Generator) -> None:
        if not 2 <= per_place <= len(positions):
            raise InputError(expected("per_place", f"at least 2 and at most {len(positions)} images", per_place))
        self.per_place, self.radius, self.generator = per_place, radius, generator
        self._points = positions.numpy()
        self._tree = cKDTree(self._points)
        near = self._tree.query_ball_point(self._points, radius, return_length=True)
        # Where there are places with enough images, only these: twice the same image is no positive pair.
        enough = near >= per_place
        self._anchors = torch.from_numpy(np.flatnonzero(enough if enough.any() else near > 1))
        self._groups = len(positions) // per_place
        if not len(self._anchors):
            hint = "A loss of pairs has nothing to attract there; use a larger positive radius."
            raise InputError(expected("positions", f"two images within {radius:g} m of each other", "none", hint))

    def __len__(self) -> int:
        return self._groups * self.per_place

    def __iter__(self) -> Iterator[int]:
        rounds = -(-self._groups // len(self._anchors))
        order = torch.cat([torch.randperm(len(self._anchors), generator=self.generator) for _ in range(rounds)])
        for anchor in self._anchors[order[: self._groups]].tolist():
            yield anchor
            around = sorted(self._tree.query_ball_point(self._points[anchor], self.radius))
            near = [row for row in around if row != anchor]
            wanted = self.per_place - 1
            rounds = -(-wanted // len(near))
            drawn = torch.cat([torch.randperm(len(near), generator=self.generator) for _ in range(rounds)])
            for number in drawn[:wanted].tolist():
                yield near[number]
