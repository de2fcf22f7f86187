"""Encoders of small images: known and other kinds, and their features; Fashion-MNIST, MNIST and Omniglot."""

from __future__ import annotations

import io
import zipfile
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import interpolate

from benchmarks.experiments.data import Split, read_idx, read_omniglot
from benchmarks.experiments.training import make_network
from benchmarks.transfer.corruption import KINDS, LEVELS, corrupt
from benchmarks.transfer.feature_file import FeatureFile
from benchmarks.transfer.train import LOSSES, Training, seeded, train

Images = NDArray[np.uint8]
"""Shape (N, H, W, C)."""
_BATCH = 250
_PAD = 4
_LUMINANCE = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in a grey value (ITU-R BT.601, as Pillow and torchvision)."""


class Known(NamedTuple):
    """Images of the kind that an encoder is trained on."""

    train: Images
    train_labels: NDArray[np.int64]
    test: Images
    test_labels: NDArray[np.int64]


class Sizes(NamedTuple):
    """Numbers of images whose features are kept, each at most as many as there are, the first ones."""

    train: int
    test: int
    corrupted: int
    """Of the test images."""
    unknown: int
    """Of each other kind."""


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
    """Images for training by row number, each shifted by up to four pixels and mirrored half of the time."""

    def __init__(self, images: Images, seed: int) -> None:
        self.images, self.rng = images, np.random.default_rng(seed)

    def __call__(self, rows: Tensor) -> Tensor:
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


@torch.no_grad()
def features_of(body: nn.Module, images: Images) -> NDArray[np.float32]:
    return torch.cat([body(make_inputs(images[at : at + _BATCH])) for at in range(0, len(images), _BATCH)]).numpy()


@lru_cache(maxsize=32)
def unknown_images(name: str, root: Path, shape: tuple[int, int, int], count: int, seed: int) -> Images:
    """Test images of another data set, in the size and the colours of the known ones.

    Args:
        name: ``"mnist"``, ``"fashionmnist"``, ``"omniglot"``, ``"omniglot_full"`` or ``"lfw"``.
        root: The data root.
        shape: Channels (1 or 3), height and width of the known images.
        count: How many, drawn at random; all where there are fewer.
        seed: Of the draw.

    Returns:
        Shape (count, H, W, C).
    """
    if name == "lfw":
        people = read_people(root, "Test")
        rows = np.random.default_rng(seed).permutation(len(people))[:count]
        pixels = torch.stack([_photograph(root, *people[row]) for row in rows])
    else:
        size = min(shape[1], 105)
        split = read_omniglot(name, root, size)[1] if name.startswith("omni") else read_idx(name, root, "t10k")
        rows = np.random.default_rng(seed).permutation(len(split))[:count]
        pixels = split.images(rows.tolist())
    if pixels.shape[2:] != shape[1:]:
        pixels = interpolate(pixels, shape[1:], mode="bilinear", antialias=True).clamp(0, 1)
    if pixels.shape[1] < shape[0]:
        pixels = pixels.expand(-1, 3, -1, -1)
    elif pixels.shape[1] > shape[0]:
        pixels = torch.einsum("nchw,c->nhw", pixels, torch.tensor(_LUMINANCE)).unsqueeze(1)
    return np.ascontiguousarray(pixels.mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy())


def read_people(root: Path, part: str) -> list[tuple[str, int]]:
    """Names and numbers of the images of ``ROOT/lfw-py/peopleDevTrain.txt`` (or ``Test``); nobody is in both.

    The first line of the file is the number of lines that follow.
    """
    _, *lines = (root / "lfw-py" / f"peopleDev{part}.txt").read_text(encoding="utf-8").splitlines()
    counts = (line.split() for line in lines if line.strip())
    return [(name, number) for name, count in counts for number in range(1, int(count) + 1)]


@lru_cache(maxsize=1)
def _archive(root: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(root / "lfw-py" / "lfw-deepfunneled.zip")


def read_face(root: Path, name: str, number: int) -> Image.Image:
    """An image of 250 x 250 pixels of ``ROOT/lfw-py/lfw-deepfunneled.zip``, read as it is."""
    jpeg = _archive(root).read(f"lfw-deepfunneled/{name}/{name}_{number:04d}.jpg")
    return Image.open(io.BytesIO(jpeg)).convert("RGB")


def _photograph(root: Path, name: str, number: int) -> Tensor:
    """The middle 224 of 256 pixels, float32 in [0, 1], shape (3, 224, 224)."""
    from torchvision.transforms import v2  # a second to import

    crop = [v2.Resize(256, antialias=True), v2.CenterCrop(224), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    return v2.Compose([*crop, v2.ToPureTensor()])(read_face(root, name, number))


_TITLES = {"fashionmnist": "Fashion-MNIST", "mnist": "MNIST"}
_OTHERS = {
    "fashionmnist": ("mnist", "omniglot"),
    "mnist": ("fashionmnist", "omniglot"),
    "omniglot": ("mnist", "fashionmnist"),
}
_TRAIN = 12_000
_TRAIN_EACH, _CHARACTERS, _TEST_EACH = 10, 250, 6
# The paper's network has 9216 features: 40 kilobytes an image.
_SIZES = Sizes(6_000, 1_000, 250, 700)
_SIZES_OMNIGLOT = _SIZES._replace(test=_CHARACTERS * _TEST_EACH)
_TRAINING = Training(epochs=3)
# Two drawings of one character are rare in a batch at random.
_TRAINING_OMNIGLOT = Training(epochs=8, rate=2e-3, batch=256, together=4)


@lru_cache(maxsize=2)
def _known(name: str, root: Path, seed: int) -> Known:
    if name != "omniglot":
        parts = (
            _chosen(split, choose(split.targets.numpy(), count, seed))
            for split, count in ((read_idx(name, root, "train"), _TRAIN), (read_idx(name, root, "t10k"), _SIZES.test))
        )
        return Known(*(array for part in parts for array in part))
    train, test = read_omniglot("omniglot_full", root)
    labels, test_labels = train.targets.numpy(), test.targets.numpy()
    rows = choose(labels, _TRAIN_EACH * len(np.unique(labels)), seed)
    characters = np.random.default_rng(seed).permutation(np.unique(test_labels))[:_CHARACTERS]
    tests = np.flatnonzero(np.isin(test_labels, characters))
    tests = tests[choose(test_labels[tests], _TEST_EACH * len(characters), seed)]
    return Known(*_chosen(train, rows), *_chosen(test, tests))


def _chosen(split: Split, rows: NDArray[np.int64]) -> tuple[Images, NDArray[np.int64]]:
    return split.pixels[torch.from_numpy(rows)].permute(0, 2, 3, 1).numpy(), split.targets.numpy()[rows]


def _make(name: str, dim: int, loss: str, root: Path, _folder: Path, seed: int) -> FeatureFile:
    omniglot = name == "omniglot"
    known, sizes = _known(name, root, seed), _SIZES_OMNIGLOT if omniglot else _SIZES
    unknown = {other: unknown_images(other, root, (1, 28, 28), sizes.unknown, seed) for other in _OTHERS[name]}
    with seeded(seed):
        encoder = make_network("fashionmnist", dim).to(memory_format=torch.channels_last)
    how, labels = _TRAINING_OMNIGLOT if omniglot else _TRAINING, torch.from_numpy(known.train_labels)
    train(encoder, lambda rows: make_inputs(known.train[rows.numpy()]), labels, loss, how, seed)
    return all_features(encoder[:-1], encoder[-1], known, unknown, sizes, seed)


GREY = {
    f"{name}-{dim}-{loss}": (f"{title}, D = {dim}, {loss}", partial(_make, name, dim, loss))
    for name, title in _TITLES.items()
    for dim in (3, 32, 128)
    for loss in LOSSES
}
"""Both data sets, dimensions 3, 32 and 128, three losses."""
OMNIGLOT = {
    f"omniglot-64-{loss}": (f"Omniglot, D = 64, {loss}", partial(_make, "omniglot", 64, loss)) for loss in LOSSES
}
"""Dimension 64, three losses."""
