"""Training, the same for every method: RMSprop with a decaying rate, on all active pairs of a batch (paper, G.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from benchmarks.data.samplers import PlaceSampler
from benchmarks.data.split import RetrievalData, loader
from benchmarks.methods.base import Setting
from benchmarks.methods.checks import check_training, positive_radius
from contrastive_curvature.demo.train import DECAY, ContrastiveStep, seed_everything
from contrastive_curvature.online import Trainer

__all__ = ["ContrastiveStep", "run_training", "seed_everything", "train", "training_loader"]

_PROBE = 8
"""Images that show a step what its encoder does."""


def train(
    setting: Setting,
    data: RetrievalData,
    seed: int,
    checkpoint: Path,
    *,
    dropout: float = 0.0,
    make_step: Callable[[nn.Module, Tensor], nn.Module] | None = None,
) -> nn.Module:
    """Train a new encoder, or go on with one from its checkpoint.

    Args:
        setting: Network and training.
        data: The training images are ``data.train``.
        seed: Of the initial weights, the order of the images, augmentations and dropout.
        checkpoint: File in a folder that exists; a finished training's gives its encoder at once.
        dropout: Rate of the dropout between all trainable layers.
        make_step: From the encoder and a few images on its device, the module whose call with a batch returns the loss;
            ``None`` for :class:`ContrastiveStep`.

    Returns:
        The step, in evaluation mode.

    Raises:
        InputError: The setting does not suit the images.
        DivergenceError: The loss is not finite.
    """
    check_training(setting, data.train)
    seed_everything(seed)
    encoder = setting.make_encoder(dropout)
    if make_step is None:
        step: nn.Module = ContrastiveStep(encoder, setting.margin, setting.relation)
    else:
        probe = data.train.images(range(min(_PROBE, len(data.train))))
        step = make_step(encoder, probe.contiguous(memory_format=torch.channels_last).to(setting.device))
    run_training(setting, step, training_loader(setting, data.train, seed), setting.epochs, setting.lr, checkpoint)
    return step.eval()


def run_training(
    setting: Setting,
    step: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    epochs: int,
    lr: float,
    checkpoint: Path,
) -> None:
    """Train the parameters of a step with the paper's optimiser.

    Args:
        setting: How often to write checkpoints, and whether to show progress.
        step: ``step(x, targets)`` returns the loss of a batch.
        batches: Iterated once an epoch.
        epochs: Passes.
        lr: Learning rate of the first epoch.
        checkpoint: File to go on from.
    """
    optimizer = torch.optim.RMSprop(step.parameters(), lr=lr)
    Trainer(
        step,
        optimizer,
        torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY),
        checkpoint=checkpoint,
        checkpoint_every=setting.checkpoint_every,
        progress=setting.progress,
    ).fit(batches, epochs)


def training_loader(setting: Setting, images: Any, seed: int) -> DataLoader[tuple[Tensor, Tensor]]:
    """Batches in a new order each epoch.

    With ``setting.per_class``, each batch holds that many images of each of ``batch_size / per_class`` classes drawn at
    random, and an epoch has as many images as the training set, less an incomplete batch. A class with fewer images
    gives some of them twice. With a relation of positions, classes are places, see :class:`PlaceSampler`.

    Args:
        setting: Size and kind of the batches.
        images: Training images, or any data set that has ``targets``.
        seed: Of the order.

    Returns:
        The loader.
    """
    generator = torch.Generator().manual_seed(seed)
    sampler: Sampler[int] | None = None
    if setting.per_class is not None and setting.relation is not None:
        sampler = PlaceSampler(images.targets, positive_radius(setting.relation), setting.per_class, generator)
    elif setting.per_class is not None:
        sampler = _class_sampler(setting, images)
    return loader(
        images,
        setting.batch_size,
        shuffle=sampler is None,
        sampler=sampler,
        generator=generator,
        workers=setting.workers,
    )


def _class_sampler(setting: Setting, images: Any) -> Sampler[int]:
    # a second to import, and only data with many classes needs it
    from pytorch_metric_learning.samplers import MPerClassSampler

    class Restartable(MPerClassSampler):
        """Shuffles its classes anew from the same order, so that an epoch depends on the random state alone.

        The parent shuffles on from where its last epoch ended, which a resumed training has not seen.
        """

        def __iter__(self) -> Iterator[int]:
            self.labels.sort()
            return super().__iter__()

    return Restartable(images.targets, setting.per_class, setting.batch_size, length_before_new_iter=len(images))
