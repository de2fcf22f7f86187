"""What an optimiser will remember of its parameters, found out without a step of the real one."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor

__all__ = ["is_of_torch", "remembered"]


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's own; a class that a user derives from one of torch's is not."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def remembered(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]] | None:
    """The state after a first step, for the names, shapes and types in it.

    Args:
        optimizer: Left as it is.

    Returns:
        For every parameter its entries, with numbers of no meaning; ``None`` for an optimiser that is not torch's, as
        its step may do anything, and for one whose step needs more than gradients.
    """
    if not is_of_torch(optimizer):
        return None
    # Without memory first. Some read numbers, which tensors without memory have not.
    for device in ("meta", "cpu"):
        try:
            return _after_a_step(optimizer, torch.device(device))
        except Exception:  # what a step refuses has no common base, and the next device may do
            continue
    return None


def _after_a_step(optimizer: torch.optim.Optimizer, device: torch.device) -> dict[int, dict[str, Any]]:
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    # A scheduler's wrapper, and the user's hooks, belong to the real one.
    twin.__dict__.pop("step", None)
    for name in [name for name in twin.__dict__ if name.startswith("_optimizer_") and name.endswith("_hooks")]:
        twin.__dict__[name] = OrderedDict()
    doubles: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            double = torch.zeros_like(p, device=device, requires_grad=False)
            double.grad = torch.zeros_like(double)
            doubles[p] = double
    twin.param_groups = [
        {
            **{name: copy.deepcopy(value) for name, value in group.items() if name != "params"},
            "params": [doubles[p] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    twin.state = defaultdict(dict)
    for p, entry in optimizer.state.items():
        twin.state[doubles[p]] = {name: _moved(value, p, device) for name, value in entry.items()}
    with torch.no_grad():
        # Below the decorators: hooks that are registered for all optimisers are not for this one.
        inspect.unwrap(type(optimizer).step)(twin)
    return twin.state_dict()["state"]


def _moved(value: Any, p: Tensor, device: torch.device) -> Any:
    if isinstance(value, Tensor) and value.shape == p.shape and p.dim():
        return torch.zeros_like(value, device=device)
    return copy.deepcopy(value)
