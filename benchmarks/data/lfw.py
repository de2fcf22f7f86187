"""Labelled Faces in the Wild with birds out of distribution: open-set face retrieval (paper, section 4 and G.1)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.data.checks import check_images, read_lines, require
from benchmarks.data.cub200 import bird_images
from benchmarks.data.options import LoadOptions
from benchmarks.data.split import FileSplit, RetrievalData
from benchmarks.data.transforms import PHOTO_SIZE, augmented, cropped
from contrastive_curvature.errors import InputError, expected

__all__ = ["load_lfw"]

_FOLDER = "lfw-py"
_ALIGNMENTS = ("lfw_funneled", "lfw-deepfunneled", "lfw")
_LISTS = {"train": "peopleDevTrain.txt", "test": "peopleDevTest.txt"}
_HOW = (
    "Get peopleDevTrain.txt, peopleDevTest.txt and lfw-deepfunneled.tgz, lfw-funneled.tgz or lfw.tgz "
    "(http://vis-www.cs.umass.edu/lfw/, or a mirror such as https://www.kaggle.com/datasets/jessicali9530/lfw-dataset; "
    "no library fetches the lists) and unpack them as torchvision.datasets.LFWPeople wants them."
)


def load_lfw(root: Path, options: LoadOptions) -> RetrievalData:
    """Read ``ROOT/lfw-py`` in the layout of ``torchvision.datasets.LFWPeople``, and the test classes of CUB200.

    The people of ``peopleDevTrain.txt`` train, those of ``peopleDevTest.txt`` test; nobody is in both. Of the folders
    ``lfw_funneled`` (torchvision's default), ``lfw-deepfunneled`` (both aligned) and ``lfw`` (as collected), the first
    that is there is read.

    Args:
        root: The data root.
        options: ``download`` (the birds only) and ``image_size`` (224) count.

    Returns:
        9525 training and 3708 test images of 4038 and 1711 people, and 5924 of birds.

    Raises:
        InputError: Files are missing or damaged, or somebody is in both lists.
    """
    size = PHOTO_SIZE if options.image_size is None else options.image_size
    folder = root / _FOLDER
    require(folder, list(_LISTS.values()), _HOW)
    images = next((folder / name for name in _ALIGNMENTS if (folder / name).is_dir()), None)
    if images is None:
        came = "none"
        raise InputError(expected(f"data root: {folder}", f"one of the folders {', '.join(_ALIGNMENTS)}", came, _HOW))
    people = {part: _people(folder / name) for part, name in _LISTS.items()}
    both = sorted(people["train"].keys() & people["test"].keys())
    if both:
        raise InputError(expected(" and ".join(_LISTS.values()), "different people", f"{both[0]} in both", _HOW))
    numbers = {name: number for number, name in enumerate([*people["train"], *people["test"]])}
    train, plain = (_split(images, people["train"], numbers, change(size)) for change in (augmented, cropped))
    birds, species = bird_images(root, options.download, test=True)
    return RetrievalData(
        name="lfw",
        title="LFW",
        ood_title="CUB200",
        train=train,
        test=_split(images, people["test"], numbers, cropped(size)),
        ood=FileSplit(birds, species, cropped(size)),
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
