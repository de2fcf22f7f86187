"""CIFAR-10 with encoders trained here: the paper's network, and a residual one with pooled features."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.experiments.networks import make_network
from benchmarks.transfer.feature_file import FeatureFile
from benchmarks.transfer.recipes.image_encoder import Augmented, Sizes, all_features, make_inputs
from benchmarks.transfer.recipes.photographs import load_photographs, unknown_to_photographs
from benchmarks.transfer.recipes.recipe import Recipe
from benchmarks.transfer.recipes.small_resnet import small_resnet
from benchmarks.transfer.train import LOSSES, Training, seeded, train

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
