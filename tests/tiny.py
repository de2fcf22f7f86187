"""A small encoder and its data, the same at every call."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Counting", "Numbered", "OfMapping", "data", "encoder", "in_batches", "numbers"]


def numbers(seed: int, *shape: int) -> Tensor:
    """Draw normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, device="cpu", generator=torch.Generator().manual_seed(seed))


def encoder(
    device: str = "cpu", *tail: nn.Module, dtype: torch.dtype = torch.float64, outputs: int = 3
) -> nn.Sequential:
    """Build two layers with a tanh between them: 43 parameters, the last layer has 18."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs), *tail).to(device, dtype)


def data(
    n: int = 12, device: str = "cpu", classes: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Draw inputs (n, 4) of classes in turn."""
    return numbers(7, n, 4).to(device, dtype), (torch.arange(n) % classes).to(device)


def in_batches(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


class Numbered:
    """Batches whose points have numbers, as those of a shard have."""

    def __init__(self, batches: Sequence[Any], numbers: Tensor) -> None:
        self.batches, self.numbers = batches, numbers

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class OfMapping(nn.Module):
    """An encoder of one entry of a mapping."""

    def __init__(self, inner: nn.Module, key: str) -> None:
        super().__init__()
        self.inner, self.key = inner, key

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.inner(batch[self.key])


class Counting(nn.Module):
    """An encoder that counts the points it has seen."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.points = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        self.points += len(x)
        return self.inner(x)
