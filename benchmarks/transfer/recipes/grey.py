"""Fashion-MNIST, MNIST and Omniglot with the paper's network."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.experiments.data.files import LoadOptions
from benchmarks.experiments.data.omniglot import load_omniglot_full
from benchmarks.experiments.data.registry import DATASETS
from benchmarks.experiments.data.split import Split, TensorSplit
from benchmarks.experiments.networks import make_network
from benchmarks.transfer.feature_file import FeatureFile
from benchmarks.transfer.recipes.image_encoder import (
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
from contrastive_curvature.errors import InputTypeError

_TITLES = {"fashionmnist": "Fashion-MNIST", "mnist": "MNIST"}
_OTHER = {"fashionmnist": "mnist", "mnist": "fashionmnist"}
_SHAPE = (1, 28, 28)
_TRAIN = 12_000
# The paper's network has 9216 features: 40 kilobytes an image.
_SIZES = Sizes(6_000, 1_000, 250, 700)
_TRAINING = Training(epochs=3)


@lru_cache(maxsize=2)
def _load(name: str, root: Path, seed: int) -> Known:
    data = DATASETS[name].load(root, LoadOptions())
    parts = []
    for split, count in ((data.train, _TRAIN), (data.test, _SIZES.test)):
        labels = split.targets.numpy()
        rows = choose(labels, count, seed)
        parts += [_pixels(split)[rows].numpy(), labels[rows]]
    return Known(*parts)


def _pixels(split: Split) -> Tensor:
    if not isinstance(split, TensorSplit):
        raise InputTypeError("split", "images in memory", type(split).__name__)
    return split.pixels.permute(0, 2, 3, 1)


def _make(name: str, dim: int, loss: str, root: Path, _folder: Path, seed: int) -> FeatureFile:
    known = _load(name, root, seed)
    others = (_OTHER[name], "omniglot")
    unknown = {other: unknown_images(other, root, _SHAPE, _SIZES.unknown, seed) for other in others}
    with seeded(seed):
        encoder = make_network("fashionmnist", dim).to(memory_format=torch.channels_last)
    train(
        encoder,
        lambda rows: make_inputs(known.train[rows.numpy()]),
        torch.from_numpy(known.train_labels),
        loss,
        _TRAINING,
        seed,
    )
    return all_features(encoder[:-1], encoder[-1], known, unknown, _SIZES, seed)


GREY = tuple(
    Recipe(f"{name}-{dim}-{loss}", f"{title}, D = {dim}, {loss}", partial(_make, name, dim, loss))
    for name, title in _TITLES.items()
    for dim in (3, 32, 128)
    for loss in LOSSES
)
"""Both data sets, dimensions 3, 32 and 128, three losses."""


_DIM = 64
_SHAPE_OMNIGLOT = (1, 28, 28)
_TRAIN_EACH, _CHARACTERS, _TEST_EACH = 10, 250, 6
# The paper's network has 9216 features: 40 kilobytes an image.
_SIZES_OMNIGLOT = Sizes(6_000, _CHARACTERS * _TEST_EACH, 250, 700)
_UNKNOWN = ("mnist", "fashionmnist")
# Two drawings of one character are rare in a batch at random.
_TRAINING_OMNIGLOT = Training(epochs=8, rate=2e-3, batch=256, together=4)


@lru_cache(maxsize=1)
def _load_omniglot(root: Path, seed: int) -> Known:
    data = load_omniglot_full(root, LoadOptions())
    labels, test_labels = data.train.targets.numpy(), data.test.targets.numpy()
    rows = choose(labels, _TRAIN_EACH * len(np.unique(labels)), seed)
    characters = np.random.default_rng(seed).permutation(np.unique(test_labels))[:_CHARACTERS]
    tests = np.flatnonzero(np.isin(test_labels, characters))
    tests = tests[choose(test_labels[tests], _TEST_EACH * len(characters), seed)]
    return Known(_drawings(data.train, rows), labels[rows], _drawings(data.test, tests), test_labels[tests])


def _drawings(split: Split, rows: NDArray[np.int64]) -> Images:
    if not isinstance(split, TensorSplit):
        raise InputTypeError("split", "images in memory", type(split).__name__)
    return split.pixels[torch.from_numpy(rows)].permute(0, 2, 3, 1).numpy()


def _make_omniglot(loss: str, root: Path, _folder: Path, seed: int) -> FeatureFile:
    known = _load_omniglot(root, seed)
    unknown = {name: unknown_images(name, root, _SHAPE_OMNIGLOT, _SIZES_OMNIGLOT.unknown, seed) for name in _UNKNOWN}
    with seeded(seed):
        encoder = make_network("fashionmnist", _DIM).to(memory_format=torch.channels_last)
    inputs = make_inputs(known.train)
    train(encoder, lambda rows: inputs[rows], torch.from_numpy(known.train_labels), loss, _TRAINING_OMNIGLOT, seed)
    return all_features(encoder[:-1], encoder.head, known, unknown, _SIZES_OMNIGLOT, seed)


OMNIGLOT = tuple(
    Recipe(f"omniglot-{_DIM}-{loss}", f"Omniglot, D = {_DIM}, {loss}", partial(_make_omniglot, loss)) for loss in LOSSES
)
"""Dimension 64, three losses."""
