"""Training an encoder with a loss of pytorch-metric-learning, on images or on features."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from pytorch_metric_learning import distances, losses, miners
from torch import Tensor, nn

LOSSES = ("contrastive", "supcon", "triplet")
"""Contrastive with a margin of 0.7 between directions; SupCon at temperature 0.1; triplets with a margin of 0.2, those
within the margin and none of the others."""

_MARGIN = 0.7
_TEMPERATURE = 0.1
_TRIPLET_MARGIN = 0.2


@dataclass(frozen=True)
class Training:
    """How long and how fast to train.

    Args:
        epochs: Passes over the data.
        rate: The largest learning rate of the cycle (it rises over the first third and falls to zero).
        batch: Inputs a step; the last, smaller batch of an epoch is left out.
        together: Inputs of one class that come after each other. Where classes are many, batches at random would have
            no two inputs of one class. What a class has beyond a multiple of it is left out, others in each epoch.
    """

    epochs: int
    rate: float = 1e-3
    batch: int = 128
    together: int = 1


def train(
    network: nn.Module,
    inputs: Callable[[Tensor], Tensor],
    labels: Tensor,
    loss: str,
    how: Training,
    seed: int,
) -> list[float]:
    """Train a network in place, leave it in evaluation mode, and return the mean loss of each epoch.

    Args:
        network: Maps inputs to raw outputs; the loss sees their directions only.
        inputs: Row numbers (B,) -> inputs (B, ...), asked in the order of training, so that it may augment.
        labels: Class labels, shape (N,).
        loss: One of :data:`LOSSES`.
        how: Length and pace.
        seed: Of the order of the inputs.
    """
    value = _loss(loss)
    generator = torch.Generator().manual_seed(seed)
    used = int((labels.unique(return_counts=True)[1] // how.together * how.together).sum())
    steps = used // how.batch
    optimizer = torch.optim.AdamW(network.parameters(), lr=how.rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, how.rate, total_steps=steps * how.epochs + 1)
    network.train()
    history = []
    for _ in range(how.epochs):
        total = 0.0
        for rows in order_of_epoch(labels, how.together, generator).split(how.batch)[:steps]:
            optimizer.zero_grad(set_to_none=True)
            mean = value(network(inputs(rows)), labels[rows])
            mean.backward()
            optimizer.step()
            schedule.step()
            total += float(mean.detach())
        history.append(total / steps)
    network.eval()
    return history


def order_of_epoch(labels: Tensor, together: int, generator: torch.Generator) -> Tensor:
    """Rows in the order of one epoch.

    Args:
        labels: Class labels, shape (N,).
        together: See :class:`Training`.
        generator: Of the order.
    """
    order = torch.randperm(len(labels), generator=generator)
    if together == 1:
        return order
    counts = labels.unique(return_counts=True)[1]
    classes = order[labels[order].argsort(stable=True)].split(counts.tolist())
    groups = torch.cat([rows[: len(rows) // together * together].view(-1, together) for rows in classes])
    return groups[torch.randperm(len(groups), generator=generator)].flatten()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Give torch's global source of randomness a seed for a while: what initialises parameters draws from it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _loss(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    if name == "contrastive":
        return losses.ContrastiveLoss(pos_margin=0.0, neg_margin=_MARGIN)
    if name == "supcon":
        return losses.SupConLoss(temperature=_TEMPERATURE)
    distance = distances.LpDistance()
    miner = miners.TripletMarginMiner(_TRIPLET_MARGIN, type_of_triplets="semihard", distance=distance)
    triplet = losses.TripletMarginLoss(_TRIPLET_MARGIN, distance=distance)
    return lambda outputs, labels: triplet(outputs, labels, miner(outputs, labels))
