"""Fashion-MNIST and MNIST with the paper's network, each the other's unknown."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.experiments.data.files import LoadOptions
from benchmarks.experiments.data.registry import DATASETS
from benchmarks.experiments.data.split import Split, TensorSplit
from benchmarks.experiments.networks import make_network
from benchmarks.transfer.feature_file import FeatureFile
from benchmarks.transfer.recipes.image_encoder import Known, Sizes, all_features, choose, make_inputs, unknown_images
from benchmarks.transfer.recipes.recipe import Recipe
from benchmarks.transfer.train import LOSSES, Training, seeded, train
from contrastive_curvature.errors import InputTypeError, expected

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
        raise InputTypeError(expected("split", "images in memory", type(split).__name__))
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
