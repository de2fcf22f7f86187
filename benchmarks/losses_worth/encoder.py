"""An encoder as its feature file has it, with what the curvature of its training loss needs besides."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.transfer.feature_file import FeatureFile, load_features
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.hessian.sphere import normalize

__all__ = ["Encoder", "proxies_beside", "read_encoder", "training_loss", "views_beside"]

TRAINED = ("contrastive", "supcon", "triplet", "ntxent", "proxies", "arcface")
"""Last words of the names of feature files: what the encoders were trained with."""

_FEWEST_IMAGES = 3
"""Of an identity whose mean direction stands for its proxy."""


@dataclass(frozen=True, eq=False)
class Encoder:
    """One encoder.

    Args:
        name: Of its feature file.
        loss: One of :data:`TRAINED`.
        content: Of the feature file.
        batch: Inputs of a batch in training.
        together: Inputs of one class that came after each other in training.
        proxies: Class weights, shape (C, D), row by class label.
        views: Features of two views of each of N training inputs, shape (2, N, F), for a loss without labels.
        learned: Whether the proxies are those of the training.
    """

    name: str
    loss: str
    content: FeatureFile
    batch: int
    together: int
    proxies: Tensor
    views: Tensor | None
    learned: bool


def training_loss(name: str) -> str | None:
    """What an encoder was trained with, by the name of its feature file; ``None`` if the name does not say."""
    if name == "faces":
        return "arcface"
    found = re.fullmatch(r".*-([a-z]+)(-seed\d+)?", name)
    return found[1] if found and found[1] in TRAINED else None


def proxies_beside(path: Path) -> Path:
    """Where the learned proxies (C, D) of a feature file are."""
    return path.with_suffix(".proxies.npy")


def views_beside(path: Path) -> Path:
    """Where the features of the two views (2, N, F) of a feature file are."""
    return path.with_suffix(".views.npy")


def read_encoder(path: Path) -> Encoder:
    """Read a feature file, and what is beside it.

    Args:
        path: Of the feature file.

    Raises:
        InputError: The name does not say what the encoder was trained with, or an array is missing or malformed.
    """
    loss = training_loss(path.stem)
    if loss is None:
        hint = "Name the file after its training loss."
        raise InputError(expected("name", f"one that ends in -{', -'.join(TRAINED)}", repr(path.stem), hint))
    content = load_features(path)
    views = _views(path, content) if loss == "ntxent" else None
    # As in benchmarks/transfer/recipes: where classes are many, a batch has several inputs of each of some classes.
    batch, together = (256, 4) if path.stem.startswith(("omniglot", "clinc150")) else (128, 1)
    if proxies_beside(path).is_file():
        return Encoder(path.stem, loss, content, batch, together, _learned(path, content), views, True)
    if loss in ("proxies", "arcface") and path.stem != "faces":
        hint = "benchmarks.transfer keeps the proxies there when it trains."
        raise InputError(expected(str(proxies_beside(path)), "the learned proxies (C, D)", "no such file", hint))
    content, proxies = _with_means(content, _FEWEST_IMAGES if path.stem == "faces" else 1)
    return Encoder(path.stem, loss, content, batch, together, proxies, views, False)


def _learned(path: Path, content: FeatureFile) -> Tensor:
    found = np.load(proxies_beside(path), allow_pickle=False)
    classes = int(content.train_labels.max()) + 1
    if found.ndim != 2 or found.shape[1] != content.dim or len(found) < classes:
        wanted = f"shape (at least {classes}, {content.dim})"
        raise InputError(expected(str(proxies_beside(path)), wanted, f"shape {found.shape}"))
    return torch.from_numpy(found.astype(np.float32))


def _views(path: Path, content: FeatureFile) -> Tensor:
    beside = views_beside(path)
    if not beside.is_file():
        hint = "benchmarks.transfer keeps them there when it trains."
        raise InputError(expected(str(beside), "features of two views (2, N, F)", "no such file", hint))
    found = np.load(beside, allow_pickle=False)
    if found.ndim != 3 or found.shape[0] != 2 or found.shape[2] != content.features:
        raise InputError(expected(str(beside), f"shape (2, N, {content.features})", f"shape {found.shape}"))
    return torch.from_numpy(found.astype(np.float32))


def _with_means(content: FeatureFile, fewest: int) -> tuple[FeatureFile, Tensor]:
    """The file with training classes of so many inputs, numbered from 0, and the mean direction of each."""
    _, inverse, counts = np.unique(content.train_labels, return_inverse=True, return_counts=True)
    kept = counts[inverse] >= fewest
    if not kept.any():
        raise InputError(expected("train_labels", f"a class of at least {fewest} inputs", f"{counts.max()} at most"))
    number = np.cumsum(counts >= fewest) - 1
    features, labels = content.train_features[kept], number[inverse[kept]]
    u = normalize(torch.from_numpy(content.outputs(features)))[0]
    sums = torch.zeros(int((counts >= fewest).sum()), content.dim).index_add_(0, torch.from_numpy(labels), u)
    parts = {name: getattr(content, name) for name in content.__dataclass_fields__}
    return FeatureFile(**parts | {"train_features": features, "train_labels": labels}), sums
