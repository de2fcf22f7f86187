"""Training images, test images, and images that are out of distribution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from contrastive_curvature.demo.config import DATASETS, DemoConfig
from contrastive_curvature.demo.idx import find_idx, read_idx
from contrastive_curvature.demo.ood import shuffle_quarters
from contrastive_curvature.errors import InputError, expected

__all__ = ["Batches", "DemoData", "load_data"]

_CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
_STEMS = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


@dataclass(frozen=True)
class DemoData:
    """Images in [0, 1], shape (N, 1, H, W), and labels, int64, shape (N,).

    Args:
        train_x: Training images.
        train_y: Their classes.
        test_x: Test images in distribution.
        test_y: Their classes.
        ood_x: Test images out of distribution.
        classes: Names of the classes.
        ood_name: What the images out of distribution are.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    ood_x: Tensor
    classes: tuple[str, ...]
    ood_name: str


class Batches:
    """Slices of tensors that are in memory already, which a ``DataLoader`` would collect image by image.

    Args:
        x: Shape (N, ...).
        y: Shape (N,), or ``None``.
        size: Points a batch.
        device: Where the batches go.
    """

    def __init__(self, x: Tensor, y: Tensor | None, size: int, device: torch.device) -> None:
        self.x, self.y, self.size, self.device = x, y, size, device

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self.x) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches ``(x, y)``; ``y`` is empty without labels."""
        for start in range(0, len(self.x), self.size):
            rows = slice(start, start + self.size)
            y = torch.empty(0, dtype=torch.long) if self.y is None else self.y[rows]
            yield self.x[rows].to(self.device), y.to(self.device)


def load_data(config: DemoConfig) -> DemoData:
    """Load and cut down the data sets.

    The choice of images does not depend on the seed of a run: seeds tell how training and sampling vary, on equal data.

    Args:
        config: Names the data set, its folder and the sizes.

    Returns:
        The data.

    Raises:
        InputError: Files are missing or damaged.
    """
    data = _digits() if config.dataset == "digits" else _fashion(config.data_root)
    train, test = _some(len(data.train_x), config.train_size), _some(len(data.test_x), config.test_size)
    ood = _some(len(data.ood_x), config.test_size)
    return DemoData(
        data.train_x[train],
        data.train_y[train],
        data.test_x[test],
        data.test_y[test],
        data.ood_x[ood],
        data.classes,
        data.ood_name,
    )


def _some(available: int, size: int | None) -> Tensor | slice:
    if size is None or size == available:
        return slice(None)
    return torch.randperm(available, generator=torch.Generator().manual_seed(0))[:size]


def _digits() -> DemoData:
    from sklearn.datasets import load_digits  # costs a second; --help does without
    from sklearn.model_selection import train_test_split

    pixels, classes = load_digits(return_X_y=True)
    size = DATASETS["digits"].test_available
    split = train_test_split(pixels, classes, test_size=size, stratify=classes, random_state=0)
    train_x, test_x = (torch.from_numpy(part).float().view(-1, 1, 8, 8) / 16 for part in split[:2])
    train_y, test_y = (torch.from_numpy(part).long() for part in split[2:])
    # Of the test images, so that nothing but the arrangement of the quarters tells the two sets apart.
    ood_x = shuffle_quarters(test_x, torch.Generator().manual_seed(0))
    names = tuple(str(digit) for digit in range(10))
    return DemoData(train_x, train_y, test_x, test_y, ood_x, names, "digits with shuffled quarters")


def _fashion(root: Path) -> DemoData:
    folders = {name: _ensure(root, name) for name in ("FashionMNIST", "MNIST")}
    train_x, train_y = _read(folders["FashionMNIST"], "train")
    test_x, test_y = _read(folders["FashionMNIST"], "test")
    ood_x, _ = _read(folders["MNIST"], "test")
    return DemoData(train_x, train_y, test_x, test_y, ood_x, _CLOTHES, "MNIST")


def _ensure(root: Path, name: str) -> Path:
    """The folder with the four files of a data set; downloads them if none is there."""
    folder = root / name / "raw"
    stems = [stem for pair in _STEMS.values() for stem in pair]
    missing = [stem for stem in stems if find_idx(folder, stem) is None]
    if not missing:
        return folder
    command = (
        f'python -c "from torchvision.datasets import {name}; [{name}({str(root)!r}, train=t, download=True) '
        'for t in (True, False)]"'
    )
    if len(missing) < len(stems):
        # torchvision would fetch all four again, over files that are the user's.
        hint = f"To fetch the official ones, over those that are there: {command}"
        raise InputError(expected(f"--data-root: {folder}", "the four IDX files", f"no {', '.join(missing)}", hint))
    try:
        import torchvision

        print(f"{folder}: empty, downloading {name}")
        getattr(torchvision.datasets, name)(root, download=True)
    except (ImportError, OSError, RuntimeError) as error:
        came = f"none, and the download failed ({str(error).strip().splitlines()[-1]})"
        hint = f"Point --data-root at the folder that holds {name}/raw, or, on a machine that may download: {command}"
        raise InputError(expected(f"--data-root: {folder}", "the four IDX files", came, hint)) from None
    return folder


def _read(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    images, labels = (read_idx(found) for stem in _STEMS[part] if (found := find_idx(folder, stem)) is not None)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        came = f"{tuple(images.shape)} and {tuple(labels.shape)}"
        raise InputError(expected(str(folder), "images (N, H, W) and labels (N,)", came, "Fetch the files again."))
    return images.unsqueeze(1).float() / 255, labels.long()
