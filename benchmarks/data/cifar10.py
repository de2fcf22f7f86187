"""CIFAR10 with SVHN out of distribution (paper, section 4 and G.1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.data.checks import fetch, require
from benchmarks.data.options import LoadOptions
from benchmarks.data.split import RetrievalData, TensorSplit
from contrastive_curvature.errors import InputError, expected

__all__ = ["load_cifar10"]


def load_cifar10(root: Path, options: LoadOptions) -> RetrievalData:
    """Read ``ROOT/cifar-10-batches-py`` and ``ROOT/test_32x32.mat`` where torchvision puts and verifies them.

    Args:
        root: The data root.
        options: Only ``download`` counts.

    Returns:
        The standard split: 50,000 and 10,000 images, and SVHN's 26,032.

    Raises:
        InputError: Files are missing, damaged or others than the published ones.
    """
    from torchvision.datasets import CIFAR10, SVHN

    batches = [f"{CIFAR10.base_folder}/{name}" for name, _ in CIFAR10.train_list + CIFAR10.test_list]
    batches.append(f"{CIFAR10.base_folder}/{CIFAR10.meta['filename']}")
    train = _open(root, "CIFAR10", "", batches, CIFAR10, options.download)
    test = CIFAR10(root, train=False)
    numbers = partial(SVHN, split="test")
    ood = _open(root, "SVHN", "split='test', ", [SVHN.split_list["test"][1]], numbers, options.download)
    return RetrievalData(
        name="cifar10",
        title="CIFAR10",
        ood_title="SVHN",
        train=_split(np.moveaxis(train.data, 3, 1), train.targets),
        test=_split(np.moveaxis(test.data, 3, 1), test.targets),
        ood=_split(ood.data, ood.labels),
        classes=tuple(test.classes),
    )


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
