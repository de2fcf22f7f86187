"""What is right for each data set in each table when the user says nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from benchmarks.experiments.data import DATASETS
from benchmarks.experiments.plan import DEMO, Table


@dataclass(frozen=True)
class DataDefaults:
    """What is right for one data set when the user says nothing.

    From the paper's G.1 and G.2 and, where they are silent (batch size, margin), the released configurations.

    Args:
        network: For :func:`benchmarks.experiments.networks.make_network`.
        dim: Latent dimension.
        epochs: Passes over the training images.
        batch_size: Images a step.
        lr: Learning rate of the first epoch.
        margin: Of the contrastive loss.
        per_class: Images of each class in a batch. Ours: of classes with few images, batches drawn at random hold no
            positive pair, and all pairs of a batch count where the paper mines triplets.
    """

    network: str
    dim: int = 2048
    epochs: int = 20
    batch_size: int = 64
    lr: float = 1e-7
    margin: float | None = 1.0
    per_class: int | None = None


_SMALL: dict[str, Any] = {"lr": 1e-3, "margin": 0.7}
_GIVEN: dict[str, dict[str, Any]] = {
    "digits": {"dim": 3, "epochs": 15, **_SMALL},
    "fashionmnist": {"dim": 3, **_SMALL},
    "mnist": {"dim": 3, **_SMALL},
    "cifar10": {"dim": 16, "batch_size": 256, "lr": 1e-5, "margin": 0.7},
    "omniglot": {"dim": 32, "per_class": 4, **_SMALL},
    "omniglot_full": {"dim": 32, "per_class": 4, **_SMALL},
    "cub200": {"per_class": 4},
    "lfw": {"epochs": 200, "per_class": 4},
    "folder": {"per_class": 4},
    "msls": {"epochs": 200, "margin": 0.1, "per_class": 4},
}
DEFAULTS = {name: DataDefaults(DATASETS[name].network, **given) for name, given in _GIVEN.items()}
"""By name of the data set."""

_DEMO_EPOCHS = 3
"""Of the demonstration on 60,000 images. They reach an mAP@1 of about 0.82, the paper's twenty epochs with its pair
sampling 0.78."""

TABLE_DATA: dict[Table, tuple[str, ...]] = {
    DEMO: ("digits", "fashionmnist", "mnist", "cifar10"),
    1: ("lfw", "fashionmnist", "mnist", "cifar10", "digits", "cub200", "omniglot", "omniglot_full", "folder"),
    2: ("fashionmnist", "mnist", "cifar10", "digits"),
    3: ("cub200", "lfw", "omniglot", "omniglot_full", "folder"),
    4: ("msls",),
}
"""Data sets that a table can be made on, the default first."""


def defaults_of(table: Table, data: str) -> DataDefaults:
    """What is right for one data set in one table."""
    short = table == DEMO and data in ("fashionmnist", "mnist")
    return dataclasses.replace(DEFAULTS[data], epochs=_DEMO_EPOCHS) if short else DEFAULTS[data]
