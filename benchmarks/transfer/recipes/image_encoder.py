"""Encoders of small images: the known images, those of other kinds, and the features of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.experiments.data.files import LoadOptions
from benchmarks.experiments.data.ood import SizedSplit
from benchmarks.experiments.data.registry import OUTSIDE
from benchmarks.transfer.corruption import KINDS, LEVELS, corrupt
from benchmarks.transfer.feature_file import FeatureFile

Images = NDArray[np.uint8]
"""Shape (N, H, W, C)."""

_BATCH = 250
_PAD = 4


@dataclass(frozen=True, eq=False)
class Known:
    """Images of the kind that an encoder is trained on.

    Args:
        train: Shape (N, H, W, C).
        train_labels: Shape (N,).
        test: Shape (M, H, W, C).
        test_labels: Shape (M,).
    """

    train: Images
    train_labels: NDArray[np.int64]
    test: Images
    test_labels: NDArray[np.int64]


@dataclass(frozen=True)
class Sizes:
    """Numbers of images whose features are kept, each at most as many as there are.

    Args:
        train: Training images, the first ones.
        test: Test images, the first ones.
        corrupted: Of the test images, those that are corrupted, the first ones.
        unknown: Images of each other kind.
    """

    train: int
    test: int
    corrupted: int
    unknown: int


def choose(labels: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
    """Row numbers of inputs in a random order, as many of each class (up to one); all where there are fewer."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    classes = np.unique(labels)
    each = -(-count // len(classes))
    rows = np.concatenate([order[labels[order] == label][:each] for label in classes])
    return rng.permutation(rows)[:count]


def make_inputs(images: Images) -> Tensor:
    """float32 in [0, 1], shape (N, C, H, W), in the memory format in which convolutions on a CPU are fastest."""
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    return pixels.div_(255).contiguous(memory_format=torch.channels_last)


class Augmented:
    """Images for training by row number, each shifted by up to four pixels and mirrored half of the time.

    Args:
        images: Shape (N, H, W, C).
        seed: Of shifts and mirroring.
    """

    def __init__(self, images: Images, seed: int) -> None:
        self.images, self.rng = images, np.random.default_rng(seed)

    def __call__(self, rows: Tensor) -> Tensor:
        """Inputs (B, C, H, W) of the images in these rows."""
        batch = self.images[rows.numpy()]
        count, height, width = batch.shape[:3]
        padded = np.pad(batch, ((0, 0), (_PAD, _PAD), (_PAD, _PAD), (0, 0)), mode="reflect")
        down = self.rng.integers(0, 2 * _PAD + 1, (count, 1)) + np.arange(height)
        right = self.rng.integers(0, 2 * _PAD + 1, (count, 1)) + np.arange(width)
        mirrored = self.rng.random(count) < 0.5
        right[mirrored] = right[mirrored, ::-1]
        return make_inputs(padded[np.arange(count)[:, None, None], down[:, :, None], right[:, None, :]])


def all_features(
    body: nn.Module, head: nn.Module, known: Known, unknown: dict[str, Images], sizes: Sizes, seed: int
) -> FeatureFile:
    """Features of training, test, corrupted and unknown images.

    Args:
        body: Inputs (B, C, H, W) in [0, 1] -> features (B, F); in evaluation mode.
        head: The last layer, linear.
        known: The known images.
        unknown: Name -> images of another kind.
        sizes: How many of each.
        seed: Of the corruption.

    Returns:
        The feature file.
    """
    test = known.test[: sizes.test]
    corrupted = test[: sizes.corrupted]
    return FeatureFile(
        train_features=features_of(body, known.train[: sizes.train]),
        train_labels=known.train_labels[: sizes.train],
        test_features=features_of(body, test),
        test_labels=known.test_labels[: sizes.test],
        weight=head.get_parameter("weight").detach().numpy(),
        bias=head.get_parameter("bias").detach().numpy(),
        unknown={name: features_of(body, images[: sizes.unknown]) for name, images in unknown.items()},
        corrupted={
            (kind, level): features_of(body, corrupt(corrupted, kind, level, seed))
            for kind in KINDS
            for level in LEVELS
        },
        corrupted_rows=np.arange(len(corrupted)),
    )


@lru_cache(maxsize=32)
def unknown_images(name: str, root: Path, shape: tuple[int, int, int], count: int, seed: int) -> Images:
    """Test images of another data set, in the size and the colours of the known ones.

    Args:
        name: A name in :data:`benchmarks.experiments.data.registry.OUTSIDE`.
        root: The data root.
        shape: Channels (1 or 3), height and width of the known images.
        count: How many, drawn at random.
        seed: Of the draw.

    Returns:
        Shape (count, H, W, C), or fewer where there are fewer.

    Raises:
        InputError: Files are missing or damaged.
    """
    source = OUTSIDE[name]
    size = min(shape[1], source.largest) if source.largest and not source.photos else None
    split = source.load(root, LoadOptions(image_size=size))
    sized = SizedSplit(split, shape, source.photos, False)
    rows = np.random.default_rng(seed).permutation(len(split))[:count]
    # In pieces: photographs come in full size.
    parts = [sized.images(part.tolist()) for part in np.array_split(rows, -(-len(rows) // _BATCH))]
    pixels = torch.cat(parts).mul(255).round().to(torch.uint8)
    return np.ascontiguousarray(pixels.permute(0, 2, 3, 1).numpy())


@torch.no_grad()
def features_of(body: nn.Module, images: Images) -> NDArray[np.float32]:
    return torch.cat([body(make_inputs(images[at : at + _BATCH])) for at in range(0, len(images), _BATCH)]).numpy()
