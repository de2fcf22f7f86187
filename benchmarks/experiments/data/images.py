"""Small images: digits, Fashion-MNIST and MNIST (IDX files), CIFAR10 and SVHN."""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.experiments.data.files import LoadOptions, fetch, require
from benchmarks.experiments.data.split import RetrievalData, TensorSplit
from contrastive_curvature.errors import InputError

_BYTES = 8
"""Type code of unsigned bytes, the only one that these data sets use."""


def read_idx(path: Path) -> Tensor:
    """Read an IDX file of unsigned bytes, gzipped if its name ends in ``.gz``.

    The format: two zero bytes, the type code, the number of axes, then each axis' length as a big-endian 32-bit number,
    then the values, last axis fastest.

    Returns:
        uint8, with the shape that the file states.

    Raises:
        InputError: It is not such a file, or shorter or longer than it states.
    """
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    start = 4 + 4 * content[3]
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if content[:3] != bytes([0, 0, _BYTES]) or len(content) != start + math.prod(shape):
        hint = "Remove the file and fetch it again."
        raise InputError(str(path), "an IDX file of unsigned bytes, whole", f"one that starts {content[:30]!r}", hint)
    # bytearray: torch wants memory that it may write to.
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(shape)


_TEST = 600
_WHITE = 16


def load_digits_data(_root: Path, _options: LoadOptions) -> RetrievalData:
    """A fixed split with as many test images of each class.

    Args:
        _root: Has no part in it: the images come with scikit-learn.
        _options: Neither have they.

    Returns:
        1197 and 600 images (1, 8, 8) of ten classes.
    """
    from sklearn.datasets import load_digits  # costs a second; the other data sets do without
    from sklearn.model_selection import train_test_split

    pixels, classes = load_digits(return_X_y=True)
    parts = train_test_split(pixels, classes, test_size=_TEST, stratify=classes, random_state=0)
    train_x, test_x = (torch.from_numpy(part).to(torch.uint8).view(-1, 1, 8, 8) for part in parts[:2])
    train_y, test_y = (torch.from_numpy(part).long() for part in parts[2:])
    return RetrievalData(
        name="digits",
        title="Digits",
        ood_title="",
        train=TensorSplit(train_x, train_y, _WHITE),
        test=TensorSplit(test_x, test_y, _WHITE),
        classes=tuple(str(digit) for digit in range(10)),
    )


CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
"""Names of the ten classes."""

_SIDE = 28
_PREFIXES = ("train", "t10k")


def load_fashionmnist(root: Path, options: LoadOptions) -> RetrievalData:
    """Read ``ROOT/FashionMNIST/raw``, IDX files, gzipped or not.

    A copy that is there is used as it is, in whatever order. What is downloaded is verified by torchvision.

    Args:
        root: The data root.
        options: Only ``download`` counts.

    Returns:
        The standard split: 60,000 and 10,000 images.

    Raises:
        InputError: Files are missing or damaged.
    """
    return _load(root, options, "FashionMNIST", CLOTHES)


def load_mnist(root: Path, options: LoadOptions) -> RetrievalData:
    """The same of ``ROOT/MNIST/raw``: 60,000 and 10,000 digits.

    As data in distribution not in the paper: for checking on other data what was chosen on the paper's.
    """
    return _load(root, options, "MNIST", tuple("0123456789"))


def _load(root: Path, options: LoadOptions, name: str, classes: tuple[str, ...]) -> RetrievalData:
    train, test = (_read(root, options, name, prefix) for prefix in _PREFIXES)
    return RetrievalData(name.lower(), name, "", train, test, classes=classes)


def idx_test(name: str, root: Path, options: LoadOptions) -> TensorSplit:
    """The test images of ``"MNIST"`` or ``"FashionMNIST"`` alone; the training files need not be there."""
    return _read(root, options, name, _PREFIXES[1])


def _read(root: Path, options: LoadOptions, name: str, prefix: str) -> TensorSplit:
    folder = root / name / "raw"
    stems = [f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"]
    command = f'python -c "from torchvision.datasets import {name}; {name}({str(root)!r}, download=True)"'
    # torchvision would fetch all four, over files that are the user's.
    if options.download and not any(folder.glob("*-idx*-ubyte*")):
        import torchvision

        fetch(lambda: getattr(torchvision.datasets, name)(root, download=True), name, f"Or: {command}")
    paths = [path for stem in stems for path in (folder / stem, folder / f"{stem}.gz") if path.is_file()]
    if {path.name.removesuffix(".gz") for path in paths} != set(stems):
        how = f"To fetch all four: {command}, or put the official files there, gzipped or not."
        raise InputError(f"data root: {folder}", f"the IDX files {', '.join(stems)}", "not both", how)
    images, labels = (read_idx(next(path for path in paths if path.name.startswith(stem))) for stem in stems)
    if images.shape[1:] != (_SIDE, _SIDE) or labels.shape != images.shape[:1]:
        got = f"{tuple(images.shape)} and {tuple(labels.shape)}"
        raise InputError(str(folder), f"images (N, {_SIDE}, {_SIDE}) and labels (N,)", got, "Fetch the files again.")
    return TensorSplit(images.unsqueeze(1), labels.long())


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
    parts = [_split_cifar10(np.moveaxis(part.data, 3, 1), part.targets) for part in (train, test)]
    return RetrievalData("cifar10", "CIFAR10", "", *parts, classes=tuple(test.classes))


def svhn_test(root: Path, options: LoadOptions) -> TensorSplit:
    """SVHN's 26,032 test images, from ``ROOT/test_32x32.mat``; see :func:`load_cifar10`."""
    from torchvision.datasets import SVHN

    files = [SVHN.split_list["test"][1]]
    made = _open(root, "SVHN", "split='test', ", files, partial(SVHN, split="test"), options.download)
    return _split_cifar10(made.data, made.labels)


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
        raise InputError(f"data root {root}", f"the published files of {name}", came, hint) from None


def _split_cifar10(images: np.ndarray, labels: Any) -> TensorSplit:
    return TensorSplit(torch.from_numpy(np.ascontiguousarray(images)), torch.as_tensor(np.asarray(labels)).long())
