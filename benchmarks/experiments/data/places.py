"""When two positions are the same place (paper, section 4.1; Warburg et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected

CITY_SPACING = 1e7
"""Metres that are added to the easting for each city before it in the list. UTM coordinates start anew in every zone,
so two cities may have the same; eastings stay below 10^6 m, so no two cities come nearer than 9,000 km. At 30 such
offsets double precision still resolves a tenth of a micrometre."""


@dataclass(frozen=True)
class WithinMetres:
    """Which images show the same place: a relation on positions, for ``pairs=`` and ``relation=``.

    Args:
        positive: Up to so many metres apart, two images show the same place.
        negative: Beyond so many, they do not. In between they are neither.

    Raises:
        InputError: ``negative`` is smaller than ``positive``.
    """

    positive: float
    negative: float

    def __post_init__(self) -> None:
        # written so that NaN fails too
        if not 0 < self.positive <= self.negative:
            wanted = "above 0, and the negative one no smaller than the positive one"
            raise InputError(expected("radii in metres", wanted, f"{self.positive} and {self.negative}"))

    def __call__(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Relate positions.

        Args:
            a: Eastings and northings in metres, float64, shape (A, 2).
            b: The same, shape (B, 2).

        Returns:
            Positive and negative pairs, bool, each of shape (A, B).

        Raises:
            InputError: They are no positions in double precision.
        """
        for name, positions in (("a", a), ("b", b)):
            if positions.ndim != 2 or positions.shape[1] != 2:
                raise InputError(expected(name, "positions of shape (N, 2)", tuple(positions.shape)))
            if positions.dtype != torch.float64:
                hint = "In single precision UTM coordinates are off by metres."
                raise InputTypeError(expected(name, "float64", str(positions.dtype), hint))
        # From differences: the product form, faster for many points, loses all digits this far from the origin.
        metres = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
        return metres <= self.positive, metres > self.negative
