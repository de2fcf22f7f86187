"""Mapillary Street-Level Sequences: visual place recognition (paper, section 4.1 and G.1; Warburg et al. 2020)."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.experiments.data.checks import check_images, require
from benchmarks.experiments.data.options import LoadOptions
from benchmarks.experiments.data.places import CITY_SPACING, WithinMetres
from benchmarks.experiments.data.split import FileSplit, RetrievalData
from benchmarks.experiments.data.transforms import photo_size, squeezed
from contrastive_curvature.errors import InputError, expected

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
        options: ``image_size`` (224), ``positive_radius`` (10) and ``negative_radius`` (25) count.

    Returns:
        Targets are eastings and northings in metres, float64 (N, 2); each city is moved away from the others, see
        :data:`~benchmarks.experiments.data.places.CITY_SPACING`. ``relation`` is that of training, ``relevance`` that
        of the test.

    Raises:
        InputError: Files or columns are missing or damaged.
    """
    size = photo_size(options)
    relation = WithinMetres(
        POSITIVE_RADIUS if options.positive_radius is None else options.positive_radius,
        NEGATIVE_RADIUS if options.negative_radius is None else options.negative_radius,
    )
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
        raise InputError(expected("msls", f"queries with a database image within {RELEVANT_RADIUS} m", came, _HOW))
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
    panoramas = {row["key"]: _flag(row["pano"], folder / "raw.csv") for row in _rows(folder / "raw.csv", "key", "pano")}
    path = folder / "postprocessed.csv"
    frames = []
    for row in _rows(path, "key", "easting", "northing"):
        if row["key"] not in panoramas:
            raise InputError(expected(str(path), "keys that are in raw.csv too", row["key"], _HOW))
        if not panoramas[row["key"]]:
            frames.append((row["key"], _metres(row["easting"], path), _metres(row["northing"], path)))
    return frames


def _rows(path: Path, *columns: str) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restval="")
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise InputError(expected(str(path), f"the columns {', '.join(columns)}", f"no {missing[0]}", _HOW))
            return list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(expected(str(path), "a table in CSV", f"a damaged one ({error})", _HOW)) from None


def _flag(text: str, path: Path) -> bool:
    if text not in ("True", "False"):
        raise InputError(expected(str(path), "True or False in the column pano", text, _HOW))
    return text == "True"


def _metres(text: str, path: Path) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) < CITY_SPACING:
        raise InputError(expected(str(path), f"UTM coordinates below {CITY_SPACING:g} m", repr(text), _HOW))
    return value
