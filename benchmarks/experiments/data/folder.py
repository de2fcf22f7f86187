"""Images of one's own, in folders by class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.data.checks import check_images, require
from benchmarks.experiments.data.options import LoadOptions
from benchmarks.experiments.data.split import FileSplit, RetrievalData
from benchmarks.experiments.data.transforms import augmented, cropped, photo_size
from contrastive_curvature.errors import InputError, expected

_FEW = 20
"""Up to so many classes get their names into plots."""
_HOW = "Put the images there, ROOT/train/CLASS/* and ROOT/test/CLASS/*, and, if there are any, ROOT/ood/**."


def load_folder(root: Path, options: LoadOptions) -> RetrievalData:
    """Read ``ROOT/train/CLASS/*``, ``ROOT/test/CLASS/*`` and, where it exists, ``ROOT/ood/**``.

    Classes are the same where their folders have the same name. Files that are no images by their name are left out.

    Args:
        root: The folder.
        options: Only ``image_size`` (224) counts.

    Returns:
        The images, as in the experiments on photographs (:mod:`benchmarks.experiments.data.transforms`): ImageNet's
        normalisation, random crops and flips in training, the centre otherwise.

    Raises:
        InputError: A part has no images, or the test set has some training classes and some others.
    """
    size = photo_size(options)
    require(root, ["train", "test"], _HOW)
    train, test = _by_class(root / "train"), _by_class(root / "test")
    shared = train.keys() & test.keys()
    if shared and shared != test.keys():
        came = f"both: {sorted(shared)[0]!r} is in training, {sorted(test.keys() - shared)[0]!r} is not"
        wanted = "only training classes (closed set), or none of them (open set)"
        raise InputError(expected(f"classes of {root / 'test'}", wanted, came, "Move one kind elsewhere."))
    names = sorted(train.keys() | test.keys())
    ood = _images(root / "ood", deep=True) if (root / "ood").is_dir() else None
    if ood is not None:
        check_images(ood, "Remove the empty folder ROOT/ood, or put images there.")
    return RetrievalData(
        name="folder",
        title=root.resolve().name,
        ood_title="" if ood is None else "ood",
        train=_split(train, names, augmented(size)),
        test=_split(test, names, cropped(size)),
        ood=None if ood is None else FileSplit(ood, torch.zeros(len(ood), dtype=torch.long), cropped(size)),
        open_set=not shared,
        classes=tuple(names) if shared and len(names) <= _FEW else (),
        train_plain=_split(train, names, cropped(size)),
    )


def _by_class(folder: Path) -> dict[str, list[Path]]:
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    found = {path.name: images for path in classes if (images := _images(path, deep=False))}
    if not found:
        raise InputError(expected(f"data root: {folder}", "a folder of images for each class", "none", _HOW))
    return found


def _images(folder: Path, deep: bool) -> list[Path]:
    from torchvision.datasets.folder import is_image_file

    files = folder.rglob("*") if deep else folder.iterdir()
    return sorted(path for path in files if path.is_file() and is_image_file(path.name))


def _split(classes: dict[str, list[Path]], names: list[str], transform: Callable[[Any], Tensor]) -> FileSplit:
    numbers = {name: number for number, name in enumerate(names)}
    labels = [numbers[name] for name, images in classes.items() for _ in images]
    return FileSplit([path for images in classes.values() for path in images], torch.tensor(labels), transform)
