"""Errors of an encoder on wrong inputs: torch's message about two matrices becomes one about ``x``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import ContrastiveCurvatureError, InputError, expected

__all__ = ["describe_points", "naming_the_input"]

_RAISED = (RuntimeError, TypeError, LookupError, ValueError, AssertionError)
"""The errors that torch's modules raise for inputs of a wrong shape or dtype."""

_HARDWARE_WORDS = ("out of memory", "allocat", "same device", "cuda error", "hip error", "cudnn", "cublas", "nccl")


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
    """Convert errors that the user's model raises on ``x`` to errors that name ``x``.

    Args:
        x: The batch.
        known: Description by :func:`describe_points` of points that the model could process before. An error on points
            of the same description has another cause than their shape, and is raised unchanged.

    Raises:
        InputError: The model raised an error on points of another description. Errors of this library, of the memory,
            of the device and of torch.compile are raised unchanged.
    """
    try:
        yield
    except (ContrastiveCurvatureError, NotImplementedError, torch.OutOfMemoryError):
        raise
    except _RAISED as error:
        lines = str(error).strip().splitlines()
        if _is_hardware_error(error) or known == describe_points(x):
            raise
        wanted = "inputs that the model can process"
        if known is not None:
            wanted = f"points of {known}, as when the model was analysed"
        raised = f"The model raised {type(error).__name__}" + (f": {lines[0].rstrip('.')}." if lines else ".")
        raise InputError(expected("x", wanted, f"points of {describe_points(x)}", raised)) from error


def _is_hardware_error(error: Exception) -> bool:
    message = str(error).lower()
    if type(error).__module__.startswith("torch._dynamo"):
        return True
    accelerator = getattr(torch, "AcceleratorError", ())  # torch before 2.8 says it in the message alone
    return isinstance(error, accelerator) or any(word in message for word in _HARDWARE_WORDS)
