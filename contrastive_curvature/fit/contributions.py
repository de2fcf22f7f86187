"""The few points that contribute most of a curvature, within one part of the data."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

from contrastive_curvature.pairs.rows import united

FEWEST_POINTS = 32
"""With fewer points than this, one point may well contribute most of the curvature, so there is no warning."""

MOST = 0.8
"""Fraction of a curvature above which points are said to dominate it. Ordinary outputs of small norm can reach 0.5."""

STORED = 16
"""How many of the largest inputs of a layer are stored."""

_FEW_FRACTION = 0.1
"""Largest fraction of the points that counts as a few points."""


@dataclass(frozen=True, order=True)
class Place:
    """Position of a point: its batch, row in the batch, number in the pass, and part of the data (or -1)."""

    batch: int
    row: int
    point: int
    part: int = -1

    def text(self) -> str:
        """Return the position as text for a message."""
        of = "" if self.part < 0 else f" of part {self.part}"
        return f"{self.point}{of} (row {self.row} of batch {self.batch})"


@dataclass(frozen=True)
class Largest:
    """The points that contribute most to a sum.

    Args:
        total: Sum of the contributions of all points.
        largest: Sizes and positions of the largest contributions, in descending order, at most :data:`STORED`.
    """

    total: float = 0.0
    largest: tuple[tuple[float, Place], ...] = ()

    def merged(self, other: Largest) -> Largest:
        """Merge the results of two sets of points."""
        largest = sorted([*self.largest, *other.largest], reverse=True)[:STORED]
        return Largest(self.total + other.total, tuple(largest))

    def fewest_dominating(self, few: int) -> tuple[float, list[Place]]:
        """Return fraction and points of the smallest dominating set, or of the ``few`` largest points."""
        fraction, places = 0.0, []
        for size, place in self.largest[:few]:
            fraction += size / self.total if self.total else 0.0
            places.append(place)
            if fraction > MOST:
                break
        return fraction, places


@dataclass(frozen=True)
class Contributions:
    """Sizes of a curvature, and of its largest points.

    Args:
        count: Number of points.
        factors: The largest points of the curvature (named ``""``), or of each of its factors.
        inputs: For every layer, the largest squared norms of its inputs.
    """

    count: int = 0
    factors: Mapping[str, Largest] = field(default_factory=dict)
    inputs: Mapping[str, Largest] = field(default_factory=dict)

    def merged(self, other: Contributions) -> Contributions:
        """Merge the results of two sets of points."""
        return Contributions(
            self.count + other.count,
            united(self.factors, other.factors, Largest.merged),
            united(self.inputs, other.inputs, Largest.merged),
        )

    def warn(self) -> None:
        """Warn if a few points contribute most of the curvature, and name them."""
        if self.count < FEWEST_POINTS:
            return
        few = max(1, int(_FEW_FRACTION * self.count))
        large = [(*inputs.fewest_dominating(few), layer) for layer, inputs in self.inputs.items()]
        if large and max(large)[0] > MOST:
            fraction, places, layer = max(large)
            _warn_of_inputs(fraction, places, layer)
            return
        dominating = {name: factor.fewest_dominating(1) for name, factor in self.factors.items()}
        name = max(dominating, key=lambda name: dominating[name][0], default="")
        if dominating and dominating[name][0] > MOST:
            fraction, (place,) = dominating[name]
            of = "" if place.part < 0 else f" of part {place.part}"
            where = f"point {place.point}{of} of the pass over the data (row {place.row} of batch {place.batch})"
            warn_of_point(fraction, where, name)


def _warn_of_inputs(fraction: float, places: list[Place], layer: str) -> None:
    shown = ", ".join(place.text() for place in places[:5])
    which = f"point {shown}" if len(places) == 1 else f"points {shown}" + (" and others" if len(places) > 5 else "")
    subject = "One point contributes" if len(places) == 1 else f"{len(places)} points contribute"
    msg = (
        f"{subject} {100 * fraction:.0f} % of the curvature (input factor of layer {layer!r}): {which} of the "
        "pass over the data. Inputs so much larger than all others make the posterior, and a prior that is chosen "
        "from the curvature, too certain for all other inputs. Leave these points out, or clip their inputs."
    )
    warnings.warn(msg, UserWarning, stacklevel=2)


def warn_of_point(fraction: float, point: str, part: str = "") -> None:
    """Warn that one point contributes most of a curvature."""
    whole = f"the curvature ({part})" if part else "the curvature"
    msg = (
        f"One point contributes {100 * fraction:.0f} % of {whole}: {point}. Its output may be nearly zero, where the "
        "Hessian grows with 1 / norm^2. The posterior, and a prior that is chosen from the curvature, say more about "
        "this point than about all others. Check its input and the norm of its output; leave the point out if it is "
        "not a valid example."
    )
    warnings.warn(msg, UserWarning, stacklevel=2)
