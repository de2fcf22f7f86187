"""Which few points contribute most of a curvature, as far as one part of the data knows it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

__all__ = ["FEWEST_POINTS", "MOST", "STORED", "Contributions", "InputSizes", "Place", "warn_of_point"]

FEWEST_POINTS = 32
"""With fewer points than this, one point may well contribute most of the curvature, so there is no warning."""

MOST = 0.8
"""Fraction of a curvature above which points are said to dominate it. Ordinary outputs of small norm can reach 0.5."""

STORED = 16
"""How many of the largest inputs of a layer are stored."""

_FEW_FRACTION = 0.1
"""Largest fraction of the points that counts as a few points."""


class Place(NamedTuple):
    """Where a point came: its batch, its row in it, its number in the pass, and the part of the data (or -1)."""

    batch: int
    row: int
    point: int
    part: int = -1

    def text(self) -> str:
        """Return it for a message."""
        of = "" if self.part < 0 else f" of part {self.part}"
        return f"{self.point}{of} (row {self.row} of batch {self.batch})"


@dataclass(frozen=True)
class InputSizes:
    """The points with the largest inputs of a layer.

    Args:
        total: Sum of the squared norms of all inputs.
        largest: Squared norms and places of the largest, in descending order, at most :data:`STORED`.
    """

    total: float = 0.0
    largest: tuple[tuple[float, Place], ...] = ()

    def merged(self, other: InputSizes) -> InputSizes:
        """Return that of all points of both."""
        largest = sorted([*self.largest, *other.largest], reverse=True)[:STORED]
        return InputSizes(self.total + other.total, tuple(largest))

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
        totals: Size of the curvature, or of each of its factors.
        names: What to call each of them in a message; empty for the whole.
        largest: The point that contributes most to each, where it may dominate: its size and its place.
        inputs: Largest inputs of every layer.
    """

    count: int
    totals: tuple[float, ...]
    names: tuple[str, ...]
    largest: Mapping[int, tuple[float, Place]]
    inputs: Mapping[str, InputSizes]

    def merged(self, other: Contributions | None) -> Contributions:
        """Return that of all points of both."""
        if other is None or not other.totals:
            return self
        if not self.totals:
            return other
        totals = tuple(a + b for a, b in zip(self.totals, other.totals, strict=True))
        largest = dict(self.largest)
        for k, found in other.largest.items():
            largest[k] = max(found, largest[k]) if k in largest else found
        nothing = InputSizes()
        inputs = {
            layer: self.inputs.get(layer, nothing).merged(other.inputs.get(layer, nothing))
            for layer in dict.fromkeys([*self.inputs, *other.inputs])
        }
        return replace(self, count=self.count + other.count, totals=totals, largest=largest, inputs=inputs)

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
        fractions = {k: size / self.totals[k] for k, (size, _) in self.largest.items() if self.totals[k]}
        part = max(fractions, key=lambda k: fractions[k], default=None)
        if part is not None and fractions[part] > MOST:
            place = self.largest[part][1]
            of = "" if place.part < 0 else f" of part {place.part}"
            where = f"point {place.point}{of} of the pass over the data (row {place.row} of batch {place.batch})"
            warn_of_point(fractions[part], where, self.names[part])

    def plain(self) -> dict[str, Any]:
        """Return it as numbers, texts, lists and dictionaries."""
        return asdict(self)

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Contributions:
        """Read what :meth:`plain` gave, perhaps through JSON, which knows no tuples and no whole numbers as keys."""
        inputs = {
            layer: InputSizes(found["total"], tuple((size, Place(*place)) for size, place in found["largest"]))
            for layer, found in plain["inputs"].items()
        }
        largest = {int(k): (size, Place(*place)) for k, (size, place) in plain["largest"].items()}
        return cls(plain["count"], tuple(plain["totals"]), tuple(plain["names"]), largest, inputs)


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
