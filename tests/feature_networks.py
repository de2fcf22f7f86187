"""What the tests of feature folders share: a small encoder, its data, and loaders of them."""

from collections.abc import Iterator
from typing import Any

import torch
from tiny import numbers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc

INPUTS, WIDTH, DIM, POINTS = 5, 7, 4, 50


def encoder(device: str = "cpu", dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The same small encoder at every call."""
    torch.manual_seed(1)
    body = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, DIM), cc.L2Norm())
    return body.to(device, dtype)


def data(device: str = "cpu", dtype: torch.dtype = torch.float64, n: int = POINTS) -> tuple[Tensor, Tensor]:
    """Inputs of unbalanced classes."""
    return numbers(7, n, INPUTS).to(device, dtype), (torch.arange(n) % 7).clamp(max=3).to(device)


def loader(x: Any, y: Tensor, size: int = 8, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=size, shuffle=shuffle)


class Interrupted:
    """A loader that raises after some batches."""

    def __init__(self, batches: list[Any], after: int) -> None:
        self.batches, self.after = batches, after

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches[: self.after]
        msg = "the disk with the images has gone"
        raise OSError(msg)
