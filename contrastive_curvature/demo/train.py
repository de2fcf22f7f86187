"""Training of the encoder, with the paper's optimiser (appendix G.1)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from contrastive_curvature.demo.config import DemoConfig
from contrastive_curvature.demo.networks import make_encoder
from contrastive_curvature.losses.contrastive import ContrastiveLoss
from contrastive_curvature.losses.mining import active_pairs
from contrastive_curvature.online import Trainer
from contrastive_curvature.pairs import RelationFunction

__all__ = ["DECAY", "ContrastiveStep", "seed_everything", "train_encoder"]

DECAY = math.exp(-0.1)
"""Factor on the learning rate after every epoch."""


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
        return self.loss(z, pairs=active_pairs(z, targets, self.margin, self.relation))


def seed_everything(seed: int) -> None:
    """Seed every source of random numbers that torch, NumPy and scikit-learn draw from.

    Args:
        seed: In [0, 2^32).
    """
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  scikit-learn draws from this generator


def train_encoder(config: DemoConfig, x: Tensor, y: Tensor, seed: int) -> tuple[nn.Sequential, float]:
    """Train an encoder on all pairs of every batch.

    Args:
        config: Dataset, latent dimension, epochs, batch size, learning rate, margin and device.
        x: Images, shape (N, 1, H, W).
        y: Classes, shape (N,).
        seed: Of the initial weights and of the order of the images.

    Returns:
        The encoder in evaluation mode, and the seconds that training took.
    """
    seed_everything(seed)
    device = torch.device(config.device)
    # channels_last: convolutions on the CPU run in less than half the time, and no slower on a GPU.
    encoder = make_encoder(config.dataset, config.dim).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    step = ContrastiveStep(encoder, config.margin)
    optimizer = torch.optim.RMSprop(step.parameters(), lr=config.lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
    started = time.perf_counter()
    Trainer(step, optimizer, schedule, progress=True).fit(_Batches(x, y, config.batch_size, seed), config.epochs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return encoder.eval(), time.perf_counter() - started


class _Batches:
    """All images once, in an order that is new every time."""

    def __init__(self, x: Tensor, y: Tensor, size: int, seed: int) -> None:
        self.x, self.y, self.size = x, y, size
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return -(-len(self.x) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.x), generator=self.generator).split(self.size):
            yield self.x[rows].contiguous(memory_format=torch.channels_last), self.y[rows]
