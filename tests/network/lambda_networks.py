"""Networks that are a function of modules and parameters by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Lambda(nn.Module):
    """Modules and parameters by name, and a function of them and the input."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, x: Any) -> Tensor:
        return self._forward(self, x)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))
