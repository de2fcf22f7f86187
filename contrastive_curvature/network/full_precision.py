"""Algebra that autocast leaves alone: its products would be in bfloat16, and differences of them all rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")


def full_precision(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function without autocast, on the device of its first tensor."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        # Entering the context takes longer than a small product.
        if not torch.is_autocast_enabled(device.type):
            return function(*args, **kwargs)
        with torch.autocast(device.type, enabled=False):
            return function(*args, **kwargs)

    return run
