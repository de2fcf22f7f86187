"""Training of the encoder, with the paper's optimiser (appendix G.1)."""

from __future__ import annotations

import math
import time

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from contrastive_curvature.demo.config import DemoConfig
from contrastive_curvature.demo.networks import make_encoder
from contrastive_curvature.loss import ContrastiveLoss
from contrastive_curvature.pairs import active_pairs

__all__ = ["seed_everything", "train_encoder"]

_DECAY = math.exp(-0.1)
"""Factor on the learning rate after every epoch."""


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
    optimizer = torch.optim.RMSprop(encoder.parameters(), lr=config.lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, _DECAY)
    loss_of = ContrastiveLoss(config.margin, normalization="type")
    order = torch.Generator().manual_seed(seed)
    started = time.perf_counter()
    steps = -(-len(x) // config.batch_size)
    with tqdm(total=config.epochs * steps, desc="[training]", unit="step", mininterval=0.5) as bar:
        for epoch in range(config.epochs):
            for number, rows in enumerate(torch.randperm(len(x), generator=order).split(config.batch_size)):
                labels = y[rows].to(device)
                z = encoder(x[rows].to(device).contiguous(memory_format=torch.channels_last))
                loss = loss_of(z, pairs=active_pairs(z, labels, config.margin))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if number % 20 == 0:  # reading the loss waits for the device
                    bar.set_postfix(epoch=f"{epoch + 1}/{config.epochs}", loss=f"{loss.item():.4f}", refresh=False)
                bar.update()
            schedule.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return encoder.eval(), time.perf_counter() - started
