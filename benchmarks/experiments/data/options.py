"""How a data set is to be read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from contrastive_curvature.errors import InputError, expected

_LEAST_SIZE = 8
"""Side in pixels below which no encoder of the benchmarks has anything to convolve."""


@dataclass(frozen=True)
class LoadOptions:
    """What a loader may be told; each refuses, through ``load_data``, what it cannot follow.

    Args:
        download: Whether files that are missing may be fetched, with the library that has them.
        image_size: Side of the square images in pixels; ``None`` for the data set's own.
        positive_radius: Training images within so many metres show the same place; ``None`` for the data set's own.
        negative_radius: Those beyond so many metres show different places; pairs in between do not count.
    """

    download: bool = False
    image_size: int | None = None
    positive_radius: float | None = None
    negative_radius: float | None = None

    def check(self) -> None:
        """Raise InputError if a value is out of range."""
        size = self.image_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < _LEAST_SIZE):
            raise InputError(expected("image_size", f"a whole number of pixels, at least {_LEAST_SIZE}", size))
        for name in ("positive_radius", "negative_radius"):
            radius = getattr(self, name)
            # written so that NaN fails too
            if radius is not None and not 0 < radius < math.inf:
                raise InputError(expected(name, "metres above 0, and finite", radius))
