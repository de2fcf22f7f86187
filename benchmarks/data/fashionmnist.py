"""FashionMNIST with MNIST out of distribution (paper, section 4 and G.1), and the other way round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from benchmarks.data.checks import fetch
from benchmarks.data.options import LoadOptions
from benchmarks.data.split import RetrievalData, TensorSplit
from contrastive_curvature.demo.idx import find_idx, read_idx
from contrastive_curvature.errors import InputError, expected

__all__ = ["CLOTHES", "load_fashionmnist", "load_mnist", "mnist_images"]

CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
"""Names of the ten classes."""

_SIDE = 28
_PREFIXES = {"train": "train", "test": "t10k"}


def load_fashionmnist(root: Path, options: LoadOptions) -> RetrievalData:
    """Read ``ROOT/FashionMNIST/raw`` and the test images of ``ROOT/MNIST/raw``, IDX files, gzipped or not.

    A copy that is there is used as it is, in whatever order. What is downloaded is verified by torchvision.

    Args:
        root: The data root.
        options: Only ``download`` counts.

    Returns:
        The standard split: 60,000 and 10,000 images, and MNIST's 10,000.

    Raises:
        InputError: Files are missing or damaged.
    """
    return _load(root, options, "FashionMNIST", "MNIST", CLOTHES)


def load_mnist(root: Path, options: LoadOptions) -> RetrievalData:
    """The same files with their parts exchanged: MNIST in distribution, FashionMNIST out of it.

    Not in the paper: it is for checking on other data what was chosen on the paper's.

    Args:
        root: See :func:`load_fashionmnist`.
        options: Only ``download`` counts.

    Returns:
        60,000 and 10,000 digits, and FashionMNIST's 10,000 test images.

    Raises:
        InputError: Files are missing or damaged.
    """
    return _load(root, options, "MNIST", "FashionMNIST", tuple("0123456789"))


def _load(root: Path, options: LoadOptions, inside: str, outside: str, classes: tuple[str, ...]) -> RetrievalData:
    _ensure(root, inside, ("train", "test"), options.download)
    _ensure(root, outside, ("test",), options.download)
    return RetrievalData(
        name=inside.lower(),
        title=inside,
        ood_title=outside,
        train=TensorSplit(*_read(root, inside, "train")),
        test=TensorSplit(*_read(root, inside, "test")),
        ood=TensorSplit(*_read(root, outside, "test")),
        classes=classes,
    )


def mnist_images(root: Path, part: str, download: bool) -> tuple[Tensor, Tensor]:
    """MNIST's images, uint8 (N, 1, 28, 28), bright ink on black, and their digits, int64 (N,).

    Args:
        root: The data root.
        part: ``"train"`` or ``"test"``.
        download: Whether they may be fetched.

    Raises:
        InputError: Files are missing or damaged.
    """
    _ensure(root, "MNIST", (part,), download)
    return _read(root, "MNIST", part)


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
    raise InputError(expected(f"data root: {folder}", "the IDX files", f"no {', '.join(missing)}", how))


def _read(root: Path, name: str, part: str) -> tuple[Tensor, Tensor]:
    folder = _folder(root, name)
    images, labels = (read_idx(found) for stem in _stems(part) if (found := find_idx(folder, stem)) is not None)
    if images.ndim != 3 or images.shape[1:] != (_SIDE, _SIDE) or labels.shape != images.shape[:1]:
        came = f"{tuple(images.shape)} and {tuple(labels.shape)}"
        wanted = f"{part} images (N, {_SIDE}, {_SIDE}) and labels (N,)"
        raise InputError(expected(str(folder), wanted, came, "Fetch the files again."))
    return images.unsqueeze(1), labels.long()
