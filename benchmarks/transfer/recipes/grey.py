"""Fashion-MNIST, MNIST and Omniglot with the paper's network."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.experiments.data import Split, read_idx, read_omniglot
from benchmarks.experiments.training import make_network
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
from benchmarks.transfer.train import LOSSES, Training, seeded, train

_TITLES = {"fashionmnist": "Fashion-MNIST", "mnist": "MNIST"}
_UNKNOWN = {
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
    unknown = {other: unknown_images(other, root, (1, 28, 28), sizes.unknown, seed) for other in _UNKNOWN[name]}
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
