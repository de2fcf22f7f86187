"""Training, the same for every method: RMSprop with a decaying rate, on all active pairs of a batch (paper, G.1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, Sampler
from tqdm import tqdm

from benchmarks.experiments.data.places import PlaceSampler, WithinMetres
from benchmarks.experiments.data.split import RetrievalData, Split, loader
from benchmarks.experiments.methods.base import Setting
from contrastive_curvature import ContrastiveLoss, DivergenceError, validate
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.pairs import RelationFunction

DECAY = math.exp(-0.1)
"""Factor on the learning rate after every epoch."""

_PROBE = 8
"""Images that show a step what its encoder does."""


class ContrastiveStep(nn.Module):
    """The contrastive loss of a batch, over all positive pairs and the negative ones inside the margin.

    Args:
        encoder: Images -> raw outputs (N, D).
        margin: On the distance of unit embeddings, in (0, 2]; ``None``: all negative pairs count.
        relation: On positions, which images show the same place; ``None`` for class labels.
    """

    def __init__(self, encoder: nn.Module, margin: float | None, relation: RelationFunction | None = None) -> None:
        super().__init__()
        self.encoder, self.margin, self.relation = encoder, margin, relation
        self.loss = ContrastiveLoss(margin, normalization="type")

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss, a scalar; zero, with a zero gradient, for a batch without pairs."""
        z = self.encoder(x)
        return self.loss(z, pairs=self.loss.mine(z, targets, self.relation))


def seed_everything(seed: int) -> None:
    """Seed every source of random numbers that torch, NumPy and scikit-learn draw from; ``seed`` in [0, 2^32)."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  scikit-learn draws from this generator


def train(
    setting: Setting,
    data: RetrievalData,
    seed: int,
    *,
    dropout: float = 0.0,
    make_step: Callable[[nn.Module, Tensor], nn.Module] | None = None,
    outputs: int | None = None,
    batches: Callable[[Setting, Any, int], Iterable[tuple[Tensor, Tensor]]] | None = None,
) -> nn.Module:
    """Train a new encoder.

    Args:
        setting: Network and training.
        data: The training images are ``data.train``.
        seed: Of the initial weights, the order of the images, augmentations and dropout.
        dropout: Rate of the dropout between all trainable layers.
        make_step: From the encoder and a few images on its device, the module whose call with a batch returns the loss;
            ``None`` for :class:`ContrastiveStep`.
        outputs: Raw outputs of the encoder, where a method needs more than the setting's ``dim``.
        batches: From the setting, the training images and the seed, the batches of an epoch; ``None`` for
            :func:`training_loader`.

    Returns:
        The step, in evaluation mode.

    Raises:
        InputError: The setting does not suit the images.
        DivergenceError: The loss is not finite.
    """
    check_training(setting, data.train)
    seed_everything(seed)
    encoder = setting.make_encoder(dropout, outputs)
    if make_step is None:
        step: nn.Module = ContrastiveStep(encoder, setting.margin, setting.relation)
    else:
        probe = data.train.images(range(min(_PROBE, len(data.train))))
        step = make_step(encoder, probe.contiguous(memory_format=torch.channels_last).to(setting.device))
    read = training_loader if batches is None else batches
    with _precision(encoder, setting):
        run_training(setting, step, read(setting, data.train, seed), setting.epochs, setting.lr)
    return step.eval()


@contextmanager
def _precision(encoder: nn.Module, setting: Setting) -> Iterator[None]:
    """Within it, the encoder computes in the setting's precision and returns float32."""
    validate.choice("setting.precision", setting.precision, ("float32", "bfloat16"))
    if setting.precision == "float32":
        yield
        return
    plain, device = encoder.forward, torch.device(setting.device).type

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            z: Tensor = plain(x)
        return z.float()

    encoder.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del encoder.forward


def run_training(
    setting: Setting,
    step: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    epochs: int,
    lr: float,
) -> None:
    """Train the parameters of a step with the paper's optimiser.

    Args:
        setting: Whether to show progress.
        step: ``step(x, targets)`` returns the loss of a batch. Where it has a method ``parameter_groups``, that gives
            the optimiser's groups from ``lr``; where it has an attribute ``optimizer``, that is its class.
        batches: Iterated once an epoch.
        epochs: Passes.
        lr: Learning rate of the first epoch.

    Raises:
        DivergenceError: The loss or a parameter is not finite.
    """
    grouped = getattr(step, "parameter_groups", None)
    made: type[torch.optim.Optimizer] = getattr(step, "optimizer", torch.optim.RMSprop)
    optimizer = made(step.parameters() if grouped is None else grouped(lr), **{"lr": lr})
    scheduler = ExponentialLR(optimizer, DECAY)
    steps = 0
    step.train()
    device = next(step.parameters()).device
    for epoch in range(1, epochs + 1):
        for x, targets in tqdm(batches, f"[epoch {epoch}/{epochs}]", unit="step", disable=not setting.progress):
            steps += 1
            loss = step(x.to(device), targets.to(device))
            if not bool(loss.isfinite()):
                raise DivergenceError(f"the loss is {float(loss)}.", steps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if not all(bool(parameter.isfinite().all()) for parameter in step.parameters()):
            raise DivergenceError("a parameter is not finite.", steps)
        scheduler.step()


def check_training(setting: Setting, images: Split) -> None:
    """Whether an encoder can be trained on these images in this setting.

    Args:
        setting: Its relation and batches are looked at.
        images: Training images; only their targets are read.

    Raises:
        InputError: Classes and batches do not go together, or no two images show the same.
        UnsupportedError: Images of each place are asked for, where the relation is none of distances.
    """
    size, per_class = setting.batch_size, setting.per_class
    if per_class is not None and size % per_class:
        raise InputError("setting.batch_size", f"a multiple of per_class={per_class}", size)
    if setting.relation is not None:
        if per_class is not None and not isinstance(setting.relation, WithinMetres):
            raise UnsupportedError("setting.per_class with a relation: it has to be one of distances, WithinMetres.")
        return
    sizes = images.targets.unique(return_counts=True)[1]
    if len(sizes) < 2 or int(sizes.max()) < 2:
        got = f"{len(images)} images of {len(sizes)} classes"
        raise InputError("data.train", "two classes, and two images of one of them", got)
    most = min(per_class * len(sizes), len(images)) if per_class is not None else size
    if size > most:
        got = f"{size} for {len(images)} images of {len(sizes)} classes"
        raise InputError("setting.batch_size", f"at most {most} with per_class={per_class}", got)


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
    own = setting.own_order and setting.per_class is None
    if own:
        sampler = _Permutation(len(images), generator)
    if setting.per_class is not None and setting.relation is not None:
        sampler = PlaceSampler(images.targets, setting.relation.positive, setting.per_class, generator)
    elif setting.per_class is not None:
        sampler = _class_sampler(setting, images)
    return loader(
        images,
        setting.batch_size,
        shuffle=sampler is None,
        sampler=sampler,
        generator=torch.Generator() if own else generator,
        workers=setting.workers,
    )


class _Permutation(Sampler[int]):
    """All images in a new order each time; torch's own sampler draws one order more a pass."""

    def __init__(self, size: int, generator: torch.Generator) -> None:
        self.size, self.generator = size, generator

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size, generator=self.generator).tolist())


def _class_sampler(setting: Setting, images: Any) -> Sampler[int]:
    # a second to import, and only data with many classes needs it
    from pytorch_metric_learning.samplers import MPerClassSampler

    class Restartable(MPerClassSampler):
        """Shuffles its classes anew from the same order, so that an epoch depends on the random state alone."""

        def __iter__(self) -> Iterator[int]:
            self.labels.sort()
            return super().__iter__()

    return Restartable(images.targets, setting.per_class, setting.batch_size, length_before_new_iter=len(images))
