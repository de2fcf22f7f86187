"""Stanford Cars, which the models trained on birds have never seen (paper, G.1)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.experiments.data.checks import check_images, require
from benchmarks.experiments.data.options import LoadOptions
from benchmarks.experiments.data.split import FileSplit
from benchmarks.experiments.data.transforms import cropped, photo_size
from contrastive_curvature.errors import InputError, expected

_FOLDER = "stanford_cars"
_PARTS = (("devkit/cars_train_annos.mat", "cars_train"), ("cars_test_annos_withlabels.mat", "cars_test"))
_LAST_TRAINING_CLASS = 98
_HOW = (
    "The original site is gone, and torchvision does not fetch them any more. Get cars_train.tgz, cars_test.tgz, "
    "car_devkit.tgz and cars_test_annos_withlabels.mat (Krause et al. 2013; mirrors are listed at "
    "https://github.com/pytorch/vision/issues/7545) and unpack them as torchvision.datasets.StanfordCars wants them."
)


def car_images(root: Path) -> tuple[list[Path], Tensor]:
    """The images of the last 98 of the 196 classes, of both official parts (Musgrave et al. 2020).

    Args:
        root: The data root, which holds ``stanford_cars`` in the layout of ``torchvision.datasets.StanfordCars``:
            ``devkit/cars_train_annos.mat``, ``cars_test_annos_withlabels.mat``, ``cars_train/`` and ``cars_test/``.

    Returns:
        N files and their classes, counted from 0, int64 (N,).

    Raises:
        InputError: Files are missing or damaged.
    """
    folder = root / _FOLDER
    require(folder, [name for part in _PARTS for name in part], _HOW)
    paths, labels = [], []
    for table, images in _PARTS:
        for name, label in _annotations(folder / table):
            if label > _LAST_TRAINING_CLASS:
                paths.append(folder / images / name)
                labels.append(label - 1)
    check_images(paths, _HOW)
    return paths, torch.tensor(labels)


def car_split(root: Path, options: LoadOptions) -> FileSplit:
    """The same as photographs of ``options.image_size``."""
    return FileSplit(*car_images(root), cropped(photo_size(options)))


def _annotations(path: Path) -> list[tuple[str, int]]:
    """File names and classes, counted from 1."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        rows = loadmat(path, squeeze_me=True)["annotations"].reshape(-1)
        return [(str(row["fname"]), int(row["class"])) for row in rows]
    except (MatReadError, OSError, ValueError, TypeError, KeyError, IndexError, NotImplementedError) as error:
        wanted = "annotations with the fields fname and class"
        raise InputError(expected(str(path), wanted, f"a file without ({error!r})", _HOW)) from None
