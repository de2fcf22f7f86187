"""The state that an optimiser will have after a step, computed without a step of the optimiser itself."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor

__all__ = ["is_torch_optimizer", "state_after_step"]


def is_torch_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the class of the optimiser is one of torch's; a subclass by the user is not."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def state_after_step(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]] | None:
    """The state after a first step, of which only names, shapes and types have a meaning.

    Args:
        optimizer: The optimiser, which is not changed.

    Returns:
        The entries of every parameter. ``None`` for an optimiser that is not torch's, whose step may have side effects,
        and for one whose step needs more than gradients.
    """
    if not is_torch_optimizer(optimizer):
        return None
    # Meta tensors need no memory, but some optimisers read values, which meta tensors do not have.
    for device in ("meta", "cpu"):
        try:
            return _step_of_copy(optimizer, torch.device(device))
        except Exception:  # the errors of a step have no common base class, and the next device may succeed
            continue
    return None


def _step_of_copy(optimizer: torch.optim.Optimizer, device: torch.device) -> dict[int, dict[str, Any]]:
    replica = object.__new__(type(optimizer))
    replica.__dict__.update(optimizer.__dict__)
    # A scheduler has wrapped the method ``step`` of the real optimiser; the wrapper and hooks must not run.
    replica.__dict__.pop("step", None)
    for name in [name for name in replica.__dict__ if name.startswith("_optimizer_") and name.endswith("_hooks")]:
        replica.__dict__[name] = OrderedDict()
    substitutes: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            substitute = torch.zeros_like(p, device=device, requires_grad=False)
            substitute.grad = torch.zeros_like(substitute)
            substitutes[p] = substitute
    replica.param_groups = [
        {
            **{name: copy.deepcopy(value) for name, value in group.items() if name != "params"},
            "params": [substitutes[p] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    replica.state = defaultdict(dict)
    for p, entry in optimizer.state.items():
        replica.state[substitutes[p]] = {name: _copy_entry(value, p, device) for name, value in entry.items()}
    with torch.no_grad():
        # Unwrapped, because the decorators would run hooks registered for all optimisers.
        inspect.unwrap(type(optimizer).step)(replica)
    return replica.state_dict()["state"]


def _copy_entry(value: Any, p: Tensor, device: torch.device) -> Any:
    if isinstance(value, Tensor) and value.shape == p.shape and p.dim():
        return torch.zeros_like(value, device=device)
    return copy.deepcopy(value)
