"""An encoder that cannot take its inputs: torch's message about two matrices becomes one about ``x``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import ContrastiveCurvatureError, InputError, expected

__all__ = ["describe_points", "naming_the_input"]

_RAISED = (RuntimeError, TypeError, LookupError, ValueError, AssertionError)
"""What torch's modules raise for inputs of a wrong shape or dtype."""

_OF_THE_MACHINE = ("out of memory", "allocat", "same device", "cuda error", "hip error", "cudnn", "cublas", "nccl")


def describe_points(x: Any) -> str:
    """Shape and dtype of one point of a batch."""
    if isinstance(x, Tensor):
        return f"shape {tuple(x.shape[1:])} and dtype {x.dtype}"
    if isinstance(x, Mapping):
        parts = (f"{key!r} of {describe_points(value)}" for key, value in x.items() if isinstance(value, Tensor))
        return "entries " + ", ".join(parts)
    return f"type {type(x).__name__}"


@contextmanager
def naming_the_input(x: Any, known: str | None = None) -> Iterator[None]:
    """Run the user's model, and say of which inputs it raised something.

    Args:
        x: The batch.
        known: Points that the model has taken before, as :func:`describe_points` puts it. An error for points like
            these is not about their shape, and stays what it is.

    Raises:
        InputError: The model raised an error for points of another kind. Errors of this library, of the memory, of
            the device and of torch.compile stay what they are.
    """
    try:
        yield
    except (ContrastiveCurvatureError, NotImplementedError, torch.OutOfMemoryError):
        raise
    except _RAISED as error:
        lines = str(error).strip().splitlines()
        if _is_of_the_machine(error) or known == describe_points(x):
            raise
        wanted = "inputs that the model can take" if known is None else f"points of {known}, as when it was analysed"
        raised = f"The model raised {type(error).__name__}" + (f": {lines[0].rstrip('.')}." if lines else ".")
        raise InputError(expected("x", wanted, f"points of {describe_points(x)}", raised)) from error


def _is_of_the_machine(error: Exception) -> bool:
    message = str(error).lower()
    if type(error).__module__.startswith("torch._dynamo"):
        return True
    return isinstance(error, torch.AcceleratorError) or any(word in message for word in _OF_THE_MACHINE)
