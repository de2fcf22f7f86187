"""What would wait for a GPU: reading one number waits until all work that was given to the GPU is done.

So conditions are looked at together, after many batches, and copies to the GPU go on by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_TOGETHER = 64
"""Conditions that are looked at together; what their errors need stays in memory as long."""

_WITHOUT_WAITING = ("cpu",)
"""Types of devices whose numbers can be read without waiting."""

_Condition = tuple[Tensor, Callable[[], Exception]]

_pending: ContextVar[list[_Condition] | None] = ContextVar("pending", default=None)


def waits(value: Tensor) -> bool:
    """Return whether reading a tensor waits until its device has done all its work."""
    return value.device.type not in _WITHOUT_WAITING


def sent(value: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; a copy from the CPU to a GPU is not waited for."""
    return value.to(device, non_blocking=device.type not in _WITHOUT_WAITING)


def unwrapped(value: Tensor) -> Tensor:
    """Return the numbers of all examples of ``torch.func.vmap``, which gives functions one of them to read."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value


def require(condition: Tensor, error: Callable[[], Exception]) -> None:
    """Raise an error unless a condition holds; on a GPU, inside :func:`seldom_waiting`, some batches later.

    Args:
        condition: A boolean, shape ().
        error: Function that returns the error; it must not hold a large tensor.
    """
    pending, condition = _pending.get(), unwrapped(condition).all()
    if pending is None or not waits(condition):
        if not bool(condition):
            raise error()
        return
    pending.append((condition, error))
    if len(pending) >= _TOGETHER:
        _look(pending)


@contextmanager
def seldom_waiting() -> Iterator[None]:
    """Look at the conditions of many batches together.

    An exception inside may follow from a condition that does not hold; then the condition's error is raised instead.
    """
    pending: list[_Condition] = []
    token = _pending.set(pending)
    try:
        try:
            yield
        finally:
            _pending.reset(token)
    except Exception:
        _look(pending)
        raise
    _look(pending)


def _look(pending: list[_Condition]) -> None:
    """Raise the error of the first condition that does not hold; leave none pending."""
    conditions = pending.copy()
    pending.clear()
    if not conditions:
        return
    device = conditions[0][0].device
    holds = torch.stack([sent(condition, device) for condition, _ in conditions]).tolist()
    for one, (_, error) in zip(holds, conditions, strict=True):
        if not one:
            raise error()
