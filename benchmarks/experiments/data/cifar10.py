"""CIFAR10, and SVHN, which is out of distribution (paper, section 4 and G.1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.experiments.data.checks import fetch, require
from benchmarks.experiments.data.options import LoadOptions
from benchmarks.experiments.data.split import RetrievalData, TensorSplit
from contrastive_curvature.errors import InputError, expected


def load_cifar10(root: Path, options: LoadOptions) -> RetrievalData:
    """Read ``ROOT/cifar-10-batches-py``, where torchvision puts and verifies it.

    Args:
        root: The data root.
        options: Only ``download`` counts.

    Returns:
        The standard split: 50,000 and 10,000 images.

    Raises:
        InputError: Files are missing, damaged or others than the published ones.
    """
    train, test = _cifar10(root, options, train=True), _cifar10(root, options, train=False)
    images = {
        part: _split(np.moveaxis(made.data, 3, 1), made.targets) for part, made in (("train", train), ("test", test))
    }
    return RetrievalData("cifar10", "CIFAR10", "", **images, classes=tuple(test.classes))


def svhn_test(root: Path, options: LoadOptions) -> TensorSplit:
    """SVHN's 26,032 test images, from ``ROOT/test_32x32.mat``; see :func:`load_cifar10`."""
    from torchvision.datasets import SVHN

    files = [SVHN.split_list["test"][1]]
    made = _open(root, "SVHN", "split='test', ", files, partial(SVHN, split="test"), options.download)
    return _split(made.data, made.labels)


def _cifar10(root: Path, options: LoadOptions, *, train: bool) -> Any:
    from torchvision.datasets import CIFAR10

    files = [f"{CIFAR10.base_folder}/{name}" for name, _ in CIFAR10.train_list + CIFAR10.test_list]
    files.append(f"{CIFAR10.base_folder}/{CIFAR10.meta['filename']}")
    return _open(root, "CIFAR10", "", files, partial(CIFAR10, train=train), options.download)


def _open(root: Path, name: str, part: str, files: list[str], make: Callable[..., Any], download: bool) -> Any:
    """The data set of torchvision, downloaded first where files are missing and may be."""
    command = f'python -c "from torchvision.datasets import {name}; {name}({str(root)!r}, {part}download=True)"'
    if download and not all((root / file).exists() for file in files):
        fetch(lambda: make(root, download=True), name, f"On a machine that may download: {command}")
    require(root, files, f"To fetch them: {command}")
    try:
        return make(root)
    except RuntimeError as error:
        # torchvision refuses whatever differs from the published MD5
        came = f"files that differ ({error})"
        hint = f"Remove them ({', '.join(str(root / file) for file in files)}) and fetch them again: {command}"
        raise InputError(expected(f"data root {root}", f"the published files of {name}", came, hint)) from None


def _split(images: np.ndarray, labels: Any) -> TensorSplit:
    return TensorSplit(torch.from_numpy(np.ascontiguousarray(images)), torch.as_tensor(np.asarray(labels)).long())
