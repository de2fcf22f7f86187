"""Places: when two positions are the same one, batches of them, and Mapillary Street-Level Sequences."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor
from torch.utils.data import Sampler

from benchmarks.experiments.data.files import LoadOptions, check_images, require
from benchmarks.experiments.data.photos import photo_size, squeezed
from benchmarks.experiments.data.split import FileSplit, RetrievalData
from contrastive_curvature.errors import InputError, InputTypeError

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
    """

    positive: float
    negative: float

    def __call__(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Relate positions.

        Args:
            a: Eastings and northings in metres, float64, shape (A, 2).
            b: The same, shape (B, 2).

        Returns:
            Positive and negative pairs, bool, each of shape (A, B).

        Raises:
            InputTypeError: They are not in double precision.
        """
        if not a.dtype == b.dtype == torch.float64:
            hint = "In single precision UTM coordinates are off by metres."
            raise InputTypeError("positions", "float64", f"{a.dtype} and {b.dtype}", hint)
        # From differences: the product form, faster for many points, loses all digits this far from the origin.
        metres = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
        return metres <= self.positive, metres > self.negative


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
        InputError: No two images are that near.
    """

    def __init__(self, positions: Tensor, radius: float, per_place: int, generator: torch.Generator) -> None:
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
            raise InputError("positions", f"two images within {radius:g} m of each other", "none", hint)

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


# fmt: off
TRAINING_CITIES = (
    "trondheim", "london", "boston", "melbourne", "amsterdam", "helsinki", "tokyo", "toronto", "saopaulo", "moscow",
    "zurich", "paris", "bangkok", "budapest", "austin", "berlin", "ottawa", "phoenix", "goa", "amman", "nairobi",
    "manila",
)
# fmt: on
"""As in the official code, where the two test cities bring them to 24."""
TEST_CITIES = ("cph", "sf")
"""Those of the official validation set. Positions of the official test cities are not public."""

POSITIVE_RADIUS, NEGATIVE_RADIUS = 10.0, 25.0
"""Of training pairs, in metres, as in the official code."""
RELEVANT_RADIUS = 25.0
"""Images within so many metres of a query are right answers (paper, section 4.1)."""

_CITIES = (*TRAINING_CITIES, *TEST_CITIES)
_SIDES = ("query", "database")
_HOW = (
    "Ask for the data at https://www.mapillary.com/dataset/places (a form, as they have a licence) and unpack all "
    "parts into one folder msls, so that CITY/{query,database}/{images/,raw.csv,postprocessed.csv} are in "
    "msls/train_val."
)


def load_msls(root: Path, options: LoadOptions) -> RetrievalData:
    """Read ``ROOT/msls/train_val`` as published: 22 cities train, the two of the official validation set test.

    These are Copenhagen and San Francisco, with all their queries and database images as in the paper's code; the
    official code takes those listed in ``subtask_index.csv``. Panoramas are left out, and so are queries without a
    right answer. All other images of the training cities train, queries and database alike.

    Args:
        root: The data root.
        options: Only ``image_size`` (224) counts.

    Returns:
        Targets are eastings and northings in metres, float64 (N, 2); each city is moved away from the others, see
        :data:`~benchmarks.experiments.data.places.CITY_SPACING`. ``relation`` is that of training, ``relevance`` that
        of the test.

    Raises:
        InputError: Files are missing.
    """
    size = photo_size(options)
    relation = WithinMetres(POSITIVE_RADIUS, NEGATIVE_RADIUS)
    folder = root / "msls" / "train_val"
    files = [
        f"{city}/{side}/{name}"
        for city in _CITIES
        for side in _SIDES
        for name in ("images", "raw.csv", "postprocessed.csv")
    ]
    require(folder, files, _HOW)
    train, queries, gallery = (
        _split(folder, cities, sides, size)
        for cities, sides in ((TRAINING_CITIES, _SIDES), (TEST_CITIES, _SIDES[:1]), (TEST_CITIES, _SIDES[1:]))
    )
    relevance = WithinMetres(RELEVANT_RADIUS, RELEVANT_RADIUS)
    return RetrievalData(
        name="msls",
        title="MSLS",
        ood_title="",
        train=train,
        test=queries.take(_answerable(queries.targets, gallery.targets, relevance)),
        gallery=gallery,
        relation=relation,
        relevance=relevance,
        open_set=True,
    )


def _answerable(queries: Tensor, gallery: Tensor, relevance: WithinMetres) -> Tensor:
    """Rows of the queries that have a right answer."""
    answered = torch.cat([relevance(block, gallery)[0].any(1) for block in queries.split(256)])
    if not answered.any():
        came = "none"
        raise InputError("msls", f"queries with a database image within {RELEVANT_RADIUS} m", came, _HOW)
    return answered.nonzero().squeeze(1)


def _split(folder: Path, cities: Sequence[str], sides: Sequence[str], size: int) -> FileSplit:
    paths: list[Path] = []
    positions: list[tuple[float, float]] = []
    for city in cities:
        for side in sides:
            for key, east, north in _frames(folder / city / side):
                paths.append(folder / city / side / "images" / f"{key}.jpg")
                positions.append((east + _CITIES.index(city) * CITY_SPACING, north))
    check_images(paths, _HOW)
    return FileSplit(paths, torch.tensor(positions, dtype=torch.float64), squeezed(size))


def _frames(folder: Path) -> list[tuple[str, float, float]]:
    """Key, easting and northing of every image that is no panorama."""
    panoramas = {row["key"] for row in _rows(folder / "raw.csv") if row["pano"] == "True"}
    return [
        (row["key"], float(row["easting"]), float(row["northing"]))
        for row in _rows(folder / "postprocessed.csv")
        if row["key"] not in panoramas
    ]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
