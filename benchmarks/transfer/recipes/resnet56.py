"""CIFAR-10 with a trunk that somebody else trained, and a linear metric head trained here.

The trunk is the pretrained ResNet-56 of github.com/akamaster/pytorch_resnet_cifar10. It was trained as a classifier on
all of CIFAR-10's training images. The features that train the head and fit a posterior are of these same images, and
better separated than features of new images. As JPEG files (quality 75) the images are harmed a little already: its
own classifier is right on 84 % of 2,000 test images and on 89 % of 10,000 training images, where it is published with
94 % on the test images as they were.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.transfer.feature_file import FeatureFile, load_features, save_features
from benchmarks.transfer.recipes.cifar_resnet import CifarResNet, load_weights
from benchmarks.transfer.recipes.image_encoder import Sizes, all_features
from benchmarks.transfer.recipes.photographs import load_photographs, unknown_to_photographs
from benchmarks.transfer.recipes.recipe import Recipe
from benchmarks.transfer.train import LOSSES, Training, seeded, train

_WEIGHTS = Path("pytorch_resnet_cifar10", "pretrained_models", "resnet56-4bfd9763.th")
_HOW = "To get it: git clone https://github.com/akamaster/pytorch_resnet_cifar10 DATA_ROOT/pytorch_resnet_cifar10"
_DEPTH = 56
_SIZES = Sizes(10_000, 2_000, 500, 1_000)
_TRAINING = Training(epochs=10, rate=3e-3)


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
    known, unknown = load_photographs(root, seed), unknown_to_photographs(root, _SIZES.unknown, seed)
    trunk = CifarResNet(_DEPTH).to(memory_format=torch.channels_last)
    load_weights(trunk, root / _WEIGHTS, _HOW)
    found = all_features(trunk.eval(), trunk.linear, known, unknown, _SIZES, seed)
    save_features(path, found)
    return found


def _make(dim: int, loss: str, root: Path, folder: Path, seed: int) -> FeatureFile:
    found = trunk_features(root, folder, seed)
    with seeded(seed):
        head = nn.Linear(found.features, dim)
    features, labels = torch.from_numpy(found.train_features), torch.from_numpy(found.train_labels)
    train(head, lambda rows: features[rows], labels, loss, _TRAINING, seed)
    return replace(found, weight=head.weight.detach().numpy(), bias=head.bias.detach().numpy())


RESNET56 = tuple(
    Recipe(
        f"cifar10-resnet56-{dim}-{loss}",
        f"CIFAR-10, pretrained ResNet-56, D = {dim}, {loss}",
        partial(_make, dim, loss),
    )
    for dim in (16, 128)
    for loss in LOSSES
)
"""Dimensions 16 and 128, three losses, one trunk."""
