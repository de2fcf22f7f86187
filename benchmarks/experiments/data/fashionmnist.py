"""FashionMNIST and MNIST, each the other's images out of distribution (paper, section 4 and G.1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from benchmarks.experiments.data.checks import fetch
from benchmarks.experiments.data.idx import find_idx, read_idx
from benchmarks.experiments.data.options import LoadOptions
from benchmarks.experiments.data.split import RetrievalData, TensorSplit
from contrastive_curvature.errors import InputError, expected

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
    raise InputError(expected(f"data root: {folder}", "the IDX files", f"no {', '.join(missing)}", how))


def _read(root: Path, name: str, part: str) -> tuple[Tensor, Tensor]:
    folder = _folder(root, name)
    images, labels = (read_idx(found) for stem in _stems(part) if (found := find_idx(folder, stem)) is not None)
    if images.ndim != 3 or images.shape[1:] != (_SIDE, _SIDE) or labels.shape != images.shape[:1]:
        came = f"{tuple(images.shape)} and {tuple(labels.shape)}"
        wanted = f"{part} images (N, {_SIDE}, {_SIDE}) and labels (N,)"
        raise InputError(expected(str(folder), wanted, came, "Fetch the files again."))
    return images.unsqueeze(1), labels.long()
