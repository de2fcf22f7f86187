"""A small encoder and its data, the same at every call."""

import torch
from torch import Tensor, nn

__all__ = ["data", "encoder", "in_batches", "numbers"]


def numbers(seed: int, *shape: int) -> Tensor:
    """Draw normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


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
