"""A small training with every source of randomness that users have, for the tests of the trainer."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from contrastive_curvature.online import OnlineLaplace, Trainer

__all__ = ["CHANCES", "checksum", "Interrupted", "Interrupting", "make_training", "states"]

CHANCES = ("generator", "global", "numpy sampler", "augmented", "none")
"""Where the order of the data, and the data, come from."""


class Augmented(Dataset[Any]):
    """Points that torch, NumPy and Python shift anew whenever they are read."""

    def __init__(self, x: Tensor, labels: Tensor) -> None:
        self.x, self.labels = x, labels

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        shift = torch.randn(()) + random.random() + np.random.rand()  # noqa: NPY002  what older augmentations draw from
        return self.x[index] + 0.1 * shift, self.labels[index]


class Interrupted(Exception):
    """Stands for a kill."""


class Interrupting:
    """A loader that breaks down before its batch number ``at``, counted over all epochs, or at an epoch's end."""

    def __init__(self, loader: Any, at: int) -> None:
        self.loader, self.at, self.count = loader, at, 0
        self.num_workers = loader.num_workers
        self.generator, self.sampler, self.batch_sampler = loader.generator, loader.sampler, loader.batch_sampler

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        for batch in self.loader:
            self._count()
            yield batch
        self._count()

    def _count(self) -> None:
        self.count += 1
        if self.count == self.at:
            raise Interrupted


def make_loader(chance: str) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    x, labels = torch.randn(24, 4, generator=generator), torch.arange(24) % 4
    data: Dataset[Any] = Augmented(x, labels) if chance == "augmented" else TensorDataset(x, labels)
    if chance == "numpy sampler":
        from pytorch_metric_learning.samplers import MPerClassSampler

        return DataLoader(data, 6, sampler=MPerClassSampler(labels, 2, batch_size=6, length_before_new_iter=24))
    if chance == "generator":
        return DataLoader(data, 6, shuffle=True, generator=torch.Generator().manual_seed(11))
    return DataLoader(data, 6, shuffle=chance != "none")


def make_training(
    chance: str, file: Path | None, every: int = 3, subset: str = "last_layer", structure: str = "diag"
) -> tuple[Trainer, DataLoader[Any]]:
    """Everything anew, as a program that starts makes it.

    Returns:
        Trainer and loader; the loader has 4 batches.
    """
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 3)
    online = OnlineLaplace(
        nn.Sequential(*layers),
        probe=torch.randn(4, 4),
        n_data=24,
        subset_of_weights=subset,
        hessian_structure=structure,
        n_samples=2,
        memory_factor=0.1,
    )
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return Trainer(online, optimizer, scheduler, checkpoint=file, checkpoint_every=every), make_loader(chance)


def states(trainer: Trainer) -> list[Any]:
    """What a training leaves, as bytes and numbers: weights, posterior, optimiser, learning rate, random numbers."""
    tensors = list(trainer.step.state_dict().values())
    for entry in trainer.optimizer.state_dict()["state"].values():
        tensors += [value for value in entry.values() if isinstance(value, Tensor)]
    numbers = [trainer.steps, trainer.optimizer.param_groups[0]["lr"], random.random(), np.random.rand()]  # noqa: NPY002
    return [t.cpu().numpy().tobytes() for t in [*tensors, torch.get_rng_state()]] + numbers


def flat(value: object) -> object:
    """Tensors as bytes, so that contents compare as a whole."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    return [flat(item) for item in value] if isinstance(value, (list, tuple)) else value


def checksum(content: Any) -> str:
    """A digest of tensors, numbers and strings, to compare contents by."""
    return hashlib.sha256(repr(flat(content)).encode()).hexdigest()
