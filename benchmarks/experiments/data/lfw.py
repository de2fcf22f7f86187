"""Labelled Faces in the Wild: open-set face retrieval (paper, section 4 and G.1)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.data.archive import names_in
from benchmarks.experiments.data.checks import check_images, read_lines, require
from benchmarks.experiments.data.options import LoadOptions
from benchmarks.experiments.data.split import FileSplit, RetrievalData
from benchmarks.experiments.data.transforms import augmented, cropped, photo_size
from contrastive_curvature.errors import InputError, expected

_FOLDER = "lfw-py"
_ALIGNMENTS = ("lfw_funneled", "lfw-deepfunneled", "lfw")
_LISTS = {"train": "peopleDevTrain.txt", "test": "peopleDevTest.txt"}
_HOW = (
    "Get peopleDevTrain.txt, peopleDevTest.txt and lfw-deepfunneled.zip, which is read as it is, or a .tgz archive "
    "(http://vis-www.cs.umass.edu/lfw/, or a mirror such as https://www.kaggle.com/datasets/jessicali9530/lfw-dataset; "
    "no library fetches the lists), unpacked as torchvision.datasets.LFWPeople wants it."
)


def load_lfw(root: Path, options: LoadOptions) -> RetrievalData:
    """Read ``ROOT/lfw-py`` in the layout of ``torchvision.datasets.LFWPeople``.

    The people of ``peopleDevTrain.txt`` train, those of ``peopleDevTest.txt`` test; nobody is in both. Of the folders
    ``lfw_funneled`` (torchvision's default), ``lfw-deepfunneled`` (both aligned) and ``lfw`` (as collected), or of the
    zip archives of these names, the first that is there is read, an archive without unpacking it.

    Args:
        root: The data root.
        options: Only ``image_size`` (224) counts.

    Returns:
        9525 training and 3708 test images of 4038 and 1711 people.

    Raises:
        InputError: Files are missing or damaged, or somebody is in both lists.
    """
    size = photo_size(options)
    folder = root / _FOLDER
    require(folder, list(_LISTS.values()), _HOW)
    places = [place for name in _ALIGNMENTS for place in (folder / name, folder / f"{name}.zip" / name)]
    images = next((place for place in places if names_in(place)), None)
    if images is None:
        wanted = f"one of the folders {', '.join(_ALIGNMENTS)}, or its zip archive"
        raise InputError(expected(f"data root: {folder}", wanted, "none", _HOW))
    people = {part: _people(folder / name) for part, name in _LISTS.items()}
    both = sorted(people["train"].keys() & people["test"].keys())
    if both:
        raise InputError(expected(" and ".join(_LISTS.values()), "different people", f"{both[0]} in both", _HOW))
    numbers = {name: number for number, name in enumerate([*people["train"], *people["test"]])}
    train, plain = (_split(images, people["train"], numbers, change(size)) for change in (augmented, cropped))
    return RetrievalData(
        name="lfw",
        title="LFW",
        ood_title="",
        train=train,
        test=_split(images, people["test"], numbers, cropped(size)),
        open_set=True,
        train_plain=plain,
    )


def _people(path: Path) -> dict[str, int]:
    """Names and numbers of images; the first line of the file is the number of lines that follow."""
    first, *rest = read_lines(path, _HOW)
    rows = [line.split() for line in rest]
    wrong = next((row for row in rows if len(row) != 2 or not row[1].isdecimal()), None)
    if wrong is not None:
        raise InputError(expected(str(path), "lines of a name and a number of images", " ".join(wrong), _HOW))
    if first.strip() != str(len(rows)):
        came = f"{len(rows)} after the first line {first.strip()!r}"
        raise InputError(expected(str(path), "as many people as its first line states", came, _HOW))
    return {name: int(count) for name, count in rows}


def _split(
    images: Path, people: dict[str, int], numbers: dict[str, int], transform: Callable[[Any], Tensor]
) -> FileSplit:
    rows = [(name, number) for name, count in people.items() for number in range(1, count + 1)]
    paths = [images / name / f"{name}_{number:04d}.jpg" for name, number in rows]
    check_images(paths, _HOW)
    return FileSplit(paths, torch.tensor([numbers[name] for name, _ in rows]), transform)
