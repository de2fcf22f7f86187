"""Small images: digits, Fashion-MNIST and MNIST (IDX files), CIFAR10 and SVHN."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable, Sequence
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


def find_idx(folder: Path, stem: str) -> Path | None:
    """The file of that name in a folder, unpacked or gzipped; ``None`` where there is neither."""
    return next((path for path in (folder / stem, folder / f"{stem}.gz") if path.is_file()), None)


def read_idx(path: Path) -> Tensor:
    """Read an IDX file of unsigned bytes, gzipped if its name ends in ``.gz``.

    The format: two zero bytes, the type code, the number of axes, then each axis' length as a big-endian 32-bit number,
    then the values, last axis fastest.

    Returns:
        uint8, with the shape that the file states.

    Raises:
        InputError: It is not such a file, or shorter or longer than it states.
    """
    hint = "Remove the file and fetch it again."
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(str(path), "a gzip file", f"a damaged one ({error})", hint) from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _BYTES:
        raise InputError(str(path), "an IDX file of unsigned bytes", f"one that starts {content[:4]!r}", hint)
    start = 4 + 4 * content[3]
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if len(content) != start + math.prod(shape):
        wanted = f"{math.prod(shape)} values for shape {tuple(shape)}"
        raise InputError(str(path), wanted, f"{max(0, len(content) - start)}", hint)
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
_PREFIXES = {"train": "train", "test": "t10k"}


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


def idx_test(name: str, root: Path, options: LoadOptions) -> TensorSplit:
    """The test images of ``"MNIST"`` or ``"FashionMNIST"`` alone; the training files need not be there."""
    return _split(root, options, name, "test")


def _load(root: Path, options: LoadOptions, name: str, classes: tuple[str, ...]) -> RetrievalData:
    _ensure(root, name, ("train", "test"), options.download)
    train, test = (_split(root, options, name, part) for part in ("train", "test"))
    return RetrievalData(name.lower(), name, "", train, test, classes=classes)


def _split(root: Path, options: LoadOptions, name: str, part: str) -> TensorSplit:
    _ensure(root, name, (part,), options.download)
    return TensorSplit(*_read(root, name, part))


def _folder(root: Path, name: str) -> Path:
    return root / name / "raw"


def _stems(part: str) -> tuple[str, str]:
    return f"{_PREFIXES[part]}-images-idx3-ubyte", f"{_PREFIXES[part]}-labels-idx1-ubyte"


def _ensure(root: Path, name: str, parts: Sequence[str], download: bool) -> None:
    folder = _folder(root, name)
    missing = [stem for part in parts for stem in _stems(part) if find_idx(folder, stem) is None]
    if not missing:
        return
    command = f'python -c "from torchvision.datasets import {name}; {name}({str(root)!r}, download=True)"'
    how = f"To fetch them: {command}, or put the official files there, gzipped or not."
    there = [stem for part in _PREFIXES for stem in _stems(part) if find_idx(folder, stem) is not None]
    if download and not there:
        import torchvision

        fetch(lambda: getattr(torchvision.datasets, name)(root, download=True), name, how)
        return
    if there:
        # torchvision would fetch all four, over files that are the user's
        how += f" The command replaces what is there ({', '.join(there)}), so nothing is downloaded unasked."
    raise InputError(f"data root: {folder}", "the IDX files", f"no {', '.join(missing)}", how)


def _read(root: Path, name: str, part: str) -> tuple[Tensor, Tensor]:
    folder = _folder(root, name)
    images, labels = (read_idx(found) for stem in _stems(part) if (found := find_idx(folder, stem)) is not None)
    if images.ndim != 3 or images.shape[1:] != (_SIDE, _SIDE) or labels.shape != images.shape[:1]:
        came = f"{tuple(images.shape)} and {tuple(labels.shape)}"
        wanted = f"{part} images (N, {_SIDE}, {_SIDE}) and labels (N,)"
        raise InputError(str(folder), wanted, came, "Fetch the files again.")
    return images.unsqueeze(1), labels.long()


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
        part: _split_cifar10(np.moveaxis(made.data, 3, 1), made.targets)
        for part, made in (("train", train), ("test", test))
    }
    return RetrievalData("cifar10", "CIFAR10", "", **images, classes=tuple(test.classes))


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
