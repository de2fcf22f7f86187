"""Communication between the processes (``torch.distributed``) that share one training, and so one checkpoint."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from contrastive_curvature.errors import ContrastiveCurvatureError, InputError, expected
from contrastive_curvature.online.learner import OnlineLaplace

__all__ = ["Processes"]

Result = TypeVar("Result")


class Processes:
    """The processes that share one training: several if ``torch.distributed`` runs and the step is shared, else one.

    All processes must call each method at the same time.

    Args:
        step: The module that is trained. It is shared if it contains a ``DistributedDataParallel``, which averages the
            gradients over all processes, or an ``OnlineLaplace``, which adds the curvatures of all processes.

    Attributes:
        count: Number of processes.
        rank: Rank of this process.
    """

    def __init__(self, step: nn.Module) -> None:
        running = torch.distributed.is_available() and torch.distributed.is_initialized()
        shares = any(isinstance(module, (DistributedDataParallel, OnlineLaplace)) for module in step.modules())
        self.count = torch.distributed.get_world_size() if running and shares else 1
        self.rank = torch.distributed.get_rank() if self.count > 1 else 0

    def gather(self, value: Any) -> list[Any]:
        """Return the values that all processes have passed, in the order of their ranks, to every process."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(values, value)
        return values

    def gather_plain(self, content: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the contents of all processes as :meth:`gather` does, with all tensors on the CPU."""
        if self.count == 1:
            return [content]
        raw = io.BytesIO()
        torch.save(content, raw)
        files = self.gather(raw.getvalue())
        return [torch.load(io.BytesIO(file), map_location="cpu", weights_only=True) for file in files]

    def differences(self, state: dict[str, Any]) -> dict[str, Any]:
        """Entries of a state that differ from those of rank 0, such as the statistics of a batch normalisation."""
        if self.count == 1:
            return {}
        sums = {name: _digest(value) for name, value in state.items()}
        first = self.gather(sums)[0]
        return {name: state[name] for name, own in sums.items() if first.get(name) != own}

    def run_in_all(self, act: Callable[[], Result]) -> Result:
        """Call a function in every process, and return its result if the function succeeds in all processes.

        Args:
            act: The function.

        Returns:
            The result in this process.

        Raises:
            Exception: The function failed in this process, or in another one, which the error names.
        """
        result, error = None, None
        try:
            result = act()
        except Exception as raised:
            error = raised
        self.raise_in_all(error)
        return result  # type: ignore[return-value]

    def raise_in_all(self, error: Exception | None) -> None:
        """Raise an error in all processes if it occurred in one, because the others would wait for that one forever.

        Args:
            error: The error in this process, or ``None``.

        Raises:
            Exception: The error of this process; or an error that names the first process that had one.
        """
        errors = self.gather(None if error is None else _packed(error))
        if error is not None:
            raise error
        for rank, packed in enumerate(errors):
            if packed is not None:
                raise _unpacked(rank, packed)

    def require_same(self, name: str, value: Any, hint: str) -> None:
        """Refuse values that are not the same in all processes.

        Args:
            name: Name of the value in the error message.
            value: The value in this process, plain content.
            hint: What the user can do, a sentence.

        Raises:
            InputError: The values differ; raised in all processes.
        """
        values = self.gather(value)
        if any(other != values[0] for other in values):
            received = ", ".join(f"{other} in process {rank}" for rank, other in enumerate(values))
            raise InputError(expected(name, f"the same in all {self.count} processes", received, hint))


def _digest(value: Any) -> str:
    raw = io.BytesIO()
    torch.save(value.cpu() if isinstance(value, Tensor) else value, raw)
    return hashlib.blake2b(raw.getvalue()).hexdigest()


def _packed(error: Exception) -> tuple[str, int | None, str]:
    if isinstance(error, OSError):
        return "OSError", error.errno, error.strerror or str(error)
    return "own" if isinstance(error, ContrastiveCurvatureError) else type(error).__name__, None, str(error)


def _unpacked(rank: int, packed: tuple[str, int | None, str]) -> Exception:
    kind, number, message = packed
    if kind == "OSError":
        return OSError(number, f"{message} (in process {rank})")
    named = "" if kind == "own" else f"{kind}: "
    msg = f"in process {rank}: {named}{message}"
    return InputError(msg)
