"""The data sets of the benchmarks: images to train with, to retrieve, and out of distribution.

:func:`load_data` reads one by name; :mod:`benchmarks.experiments.data.split` says what comes back.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.experiments.data.files import LoadOptions
from benchmarks.experiments.data.ood import check_ood, with_ood
from benchmarks.experiments.data.registry import DATASETS, DatasetEntry
from benchmarks.experiments.data.split import FileSplit, RetrievalData, Split, TensorSplit, loader
from contrastive_curvature.errors import InputError

__all__ = ["DATASETS", "DatasetEntry", "FileSplit", "RetrievalData", "Split", "TensorSplit", "load_data", "loader"]

_LEAST_SIZE = 8
"""Side in pixels below which no encoder of the benchmarks has anything to convolve."""


def load_data(
    name: str,
    root: str | Path,
    *,
    ood: str | None = None,
    train_size: int | None = None,
    test_size: int | None = None,
    download: bool = False,
    image_size: int | None = None,
) -> RetrievalData:
    """Read a data set, with images that are out of distribution.

    A smaller part is a random choice of images, not of classes, that is the same in every run; so runs with different
    seeds tell how training and sampling vary. In open-set data a choice may leave queries without a second image of
    their class.

    Args:
        name: One of :data:`DATASETS`; its loader says which files it reads, and where.
        root: The data root.
        ood: What stands for the unknown: another of :data:`DATASETS` (its test images), ``"svhn"``, ``"cars196"``,
            ``"shuffled"`` or ``"none"``, sized to the data set's images; ``None`` for the data set's own.
        train_size: Training images; ``None`` for all.
        test_size: Queries, and at most as many images out of distribution; ``None`` for all. A gallery is never cut.
        download: Whether files that are missing may be fetched into the root, with verified checksums, where a library
            or an open address has them. Nothing is fetched otherwise.
        image_size: Side of the images in pixels; ``None`` for the data set's own.

    Returns:
        The data.

    Raises:
        InputError: An argument is out of range or of no use for this data set, or files are missing or damaged.
    """
    if name not in DATASETS:
        raise InputError("name", f"one of {', '.join(map(repr, DATASETS))}", name)
    check_ood(name, ood)
    options = LoadOptions(download, image_size)
    if image_size is not None and not DATASETS[name].largest:
        others = ", ".join(other for other, its in DATASETS.items() if its.largest)
        hint = f"Its images have one size; leave it out. These can be resized: {others}."
        raise InputError(f"image_size for {name!r}", "None", image_size, hint)
    if image_size is not None and image_size < _LEAST_SIZE:
        raise InputError("image_size", f"a whole number of pixels, at least {_LEAST_SIZE}", image_size)
    data = with_ood(name, DATASETS[name].load(Path(root), options), ood, Path(root), options)
    train = _choice("train_size", len(data.train), train_size)
    test = _choice("test_size", len(data.test), test_size)
    if train is not None:
        plain = None if data.train_plain is None else data.train_plain.take(train)
        data = replace(data, train=data.train.take(train), train_plain=plain)
    if test is not None:
        data = replace(data, test=data.test.take(test))
    if data.ood is not None and test_size is not None and test_size < len(data.ood):
        data = replace(data, ood=data.ood.take(_rows(len(data.ood), test_size)))
    return data


def _choice(argument: str, available: int, size: int | None) -> Tensor | None:
    if size is not None and size > available:
        raise InputError(argument, f"at most the {available} images that there are", size)
    return None if size is None or size == available else _rows(available, size)


def _rows(available: int, size: int) -> Tensor:
    return torch.randperm(available, generator=torch.Generator().manual_seed(0))[:size]
