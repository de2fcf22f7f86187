"""The residual network for CIFAR-10 of 6n + 2 layers (He et al. 2016, section 4.2), for weights that others trained."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from contrastive_curvature.errors import InputError, expected

_WIDTHS = (16, 32, 64)
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, with which the published weights were trained."""


class _Block(nn.Module):
    """Two convolutions; the shortcut has no parameters (option A: every other pixel, new channels are zero)."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.step, self.new = after // before, after - before
        self.conv1 = nn.Conv2d(before, after, 3, stride=self.step, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        half = self.new // 2
        return torch.relu(inner + pad(x[:, :, :: self.step, :: self.step], (0, 0, 0, 0, half, half)))


class CifarResNet(nn.Module):
    """Inputs (N, 3, 32, 32) in [0, 1] -> 64 features, averages over the image.

    The names of its parameters are those of the weights that akamaster/pytorch_resnet_cifar10 publishes.

    Args:
        depth: 6n + 2; 56 has n = 9.

    Raises:
        InputError: There is no such network.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise InputError(expected("depth", "6n + 2 with n at least 1", depth))
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, _WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(_WIDTHS[0])
        before = _WIDTHS[0]
        for number, width in enumerate(_WIDTHS, start=1):
            layer = [_Block(before if first == 0 else width, width) for first in range(blocks)]
            self.add_module(f"layer{number}", nn.Sequential(*layer))
            before = width
        self.linear = nn.Linear(_WIDTHS[-1], 10)
        self.register_buffer("mean", torch.tensor(_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(_DEVIATION).view(3, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Features; :attr:`linear` maps them to the scores of ten classes."""
        x = (x - self.get_buffer("mean")) / self.get_buffer("deviation")
        x = torch.relu(self.bn1(self.conv1(x)))
        for number in range(1, len(_WIDTHS) + 1):
            x = self.get_submodule(f"layer{number}")(x)
        return x.mean((2, 3))


def load_weights(network: nn.Module, path: Path, how: str) -> None:
    """Put published weights into a network.

    Args:
        network: Of the architecture that the weights are for.
        path: A checkpoint with ``state_dict``, whose names start with ``module.``.
        how: How to get it, a sentence.

    Raises:
        InputError: It is missing, damaged, or for another network.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        state = {name.removeprefix("module."): value for name, value in content["state_dict"].items()}
        network.load_state_dict(state)
    except (OSError, RuntimeError, KeyError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        came = f"what cannot be read ({(str(error) or type(error).__name__).splitlines()[0]})"
        raise InputError(expected(str(path), f"weights of {type(network).__name__}", came, how)) from None
