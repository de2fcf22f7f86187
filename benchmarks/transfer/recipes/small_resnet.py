"""A residual network small enough for a CPU, with pooled features."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import torch
from torch import Tensor, nn

POOLED = 256
"""Features before the last layer."""

_CHANNELS = (16, 32, 64, POOLED)


class _Block(nn.Module):
    """Two convolutions of half the resolution, and a projection beside them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.beside = nn.Sequential(nn.Conv2d(before, after, 1, stride=2, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(inner + self.beside(x))


def small_resnet(dim: int) -> nn.Sequential:
    """An encoder of colour images, 19 million multiplications for one of 32 x 32 pixels.

    Args:
        dim: Latent dimension D.

    Returns:
        float32 (N, 3, H, W) -> raw outputs (N, D); its last part is the ``nn.Linear`` named ``"head"``, and what goes
        into it are averages over the image, none of them negative.
    """
    first = _CHANNELS[0]
    stem = nn.Sequential(nn.Conv2d(3, first, 3, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU())
    parts: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    for number, (before, after) in enumerate(pairwise(_CHANNELS), start=1):
        parts[f"block{number}"] = _Block(before, after)
    parts |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "head": nn.Linear(POOLED, dim)}
    return nn.Sequential(parts)
