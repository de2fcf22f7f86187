"""Encoders for ``benchmarks.losses_worth`` alone: NT-Xent on two views without labels, softmaxes over class weights.

Fashion-MNIST in dimensions 32 and 128, and Omniglot, with the network and the test inputs of ``grey.py`` and
``omniglot.py``. Beside the feature file, what the curvature of these losses needs is kept: ``NAME.views.npy``, the
features of two views of some training inputs, shape (2, N, F), in half precision, and ``NAME.proxies.npy``, the class
weights (C, D).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_metric_learning import losses
from torch import Tensor, nn

from benchmarks.experiments.networks import make_network
from benchmarks.losses_worth.encoder import proxies_beside, views_beside
from benchmarks.transfer.feature_file import FeatureFile
from benchmarks.transfer.recipes import grey, omniglot
from benchmarks.transfer.recipes.image_encoder import Known, Sizes, all_features, make_inputs, unknown_images
from benchmarks.transfer.recipes.recipe import Recipe
from benchmarks.transfer.recipes.two_views import TwoViews
from benchmarks.transfer.train import Training, seeded, train

__all__ = ["VIEWS_AND_PROXIES"]

TEMPERATURE, SCALE, MARGIN = 0.1, 16.0, 0.3
"""Of NT-Xent; of both softmaxes; of ArcFace, in radians."""

_SHAPE = (1, 28, 28)
_VIEWS = 4_000
_GREY = Training(epochs=3, precision="bfloat16")
_LETTERS = Training(epochs=8, rate=2e-3, batch=256, precision="bfloat16")
_BATCH = 250


def _make(data: str, dim: int, loss: str, root: Path, folder: Path, seed: int) -> FeatureFile:
    letters = data == "omniglot"
    known = omniglot._load(root, seed) if letters else grey._load(data, root, seed)
    sizes = omniglot._SIZES if letters else grey._SIZES
    others = omniglot._UNKNOWN if letters else ("mnist", "omniglot")
    unknown = {name: unknown_images(name, root, _SHAPE, sizes.unknown, seed) for name in others}
    with seeded(seed):
        encoder = make_network("fashionmnist", dim).to(memory_format=torch.channels_last)
        value = _loss(loss, int(known.train_labels.max()) + 1, dim)
    how = _LETTERS if letters else _GREY
    beside = folder / f"{_name(data, dim, loss)}{f'-seed{seed}' if seed else ''}.npz"
    if loss == "ntxent":
        views = TwoViews(known.train, seed, mirrored=not letters)
        train(encoder, views, torch.arange(len(known.train)), value, how, seed)
        np.save(views_beside(beside), _views(encoder[:-1], known, sizes, views))
    else:
        inputs = make_inputs(known.train)
        train(encoder, lambda rows: inputs[rows], torch.from_numpy(known.train_labels), value, how, seed)
        np.save(proxies_beside(beside), value.get_parameter("W").detach().T.contiguous().numpy())
    return all_features(encoder[:-1], encoder[-1], known, unknown, sizes, seed)


def _loss(name: str, classes: int, dim: int) -> nn.Module:
    if name == "ntxent":
        found: nn.Module = losses.NTXentLoss(temperature=TEMPERATURE)
    elif name == "proxies":
        found = losses.NormalizedSoftmaxLoss(classes, dim, temperature=1 / SCALE)
    else:
        found = losses.ArcFaceLoss(classes, dim, margin=float(np.degrees(MARGIN)), scale=SCALE)
    return found


@torch.no_grad()
def _views(body: nn.Module, known: Known, sizes: Sizes, draw: TwoViews) -> NDArray[np.float16]:
    parts: list[list[Tensor]] = [[], []]
    for rows in torch.arange(min(_VIEWS, sizes.train, len(known.train))).split(_BATCH):
        for part, view in zip(parts, body(draw(rows)).half().chunk(2), strict=True):
            part.append(view)
    return torch.stack([torch.cat(part) for part in parts]).numpy()


def _name(data: str, dim: int, loss: str) -> str:
    return f"{data}-{dim}-{loss}"


_TITLES = {"ntxent": "NT-Xent on views", "proxies": "normalised softmax", "arcface": "ArcFace"}

VIEWS_AND_PROXIES = tuple(
    Recipe(_name(data, dim, loss), f"{title}, D = {dim}, {of_loss}", partial(_make, data, dim, loss))
    for data, title, dim in (
        ("fashionmnist", "Fashion-MNIST", 32),
        ("fashionmnist", "Fashion-MNIST", 128),
        ("omniglot", "Omniglot", omniglot._DIM),
    )
    for loss, of_loss in _TITLES.items()
)
"""Three encoders a loss."""
