"""Several processes (``torch.distributed``) that share one training, and so one checkpoint."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from contrastive_curvature.errors import ContrastiveCurvatureError, InputError, expected
from contrastive_curvature.online.learner import OnlineLaplace
from contrastive_curvature.online.plain import checksum

__all__ = ["Processes"]

Made = TypeVar("Made")


class Processes:
    """The processes of one training, which is this one alone unless ``torch.distributed`` runs and the step shares.

    Every method is called by all of them at the same time.

    Args:
        step: What is trained. It shares its training if it holds a ``DistributedDataParallel``, whose gradients are
            those of all, or an ``OnlineLaplace``, whose curvature is.

    Attributes:
        count: How many they are.
        rank: The number of this one.
    """

    def __init__(self, step: nn.Module) -> None:
        running = torch.distributed.is_available() and torch.distributed.is_initialized()
        shares = any(isinstance(module, (DistributedDataParallel, OnlineLaplace)) for module in step.modules())
        self.count = torch.distributed.get_world_size() if running and shares else 1
        self.rank = torch.distributed.get_rank() if self.count > 1 else 0

    def gather(self, value: Any) -> list[Any]:
        """What every process has passed, in the order of their ranks, in every process."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(found, value)
        return found

    def gather_plain(self, content: dict[str, Any]) -> list[dict[str, Any]]:
        """The same for content with tensors, which come to the CPU."""
        if self.count == 1:
            return [content]
        raw = io.BytesIO()
        torch.save(content, raw)
        found = self.gather(raw.getvalue())
        return [torch.load(io.BytesIO(one), map_location="cpu", weights_only=True) for one in found]

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        """What of a state is another than in the process of rank 0, such as the statistics of a batch normalisation."""
        if self.count == 1:
            return {}
        sums = {name: checksum(value) for name, value in state.items()}
        first = self.gather(sums)[0]
        return {name: state[name] for name, one in sums.items() if first.get(name) != one}

    def together(self, act: Callable[[], Made]) -> Made:
        """Do something in every process, and go on when it has succeeded in all.

        Raises:
            Exception: See :meth:`agree`.
        """
        made, error = None, None
        try:
            made = act()
        except Exception as raised:
            error = raised
        self.agree(error)
        return made  # type: ignore[return-value]

    def agree(self, error: Exception | None) -> None:
        """Raise in all processes what came in one of them, which would otherwise leave the others waiting for it.

        Args:
            error: What came in this process.

        Raises:
            Exception: That error, or one that names the first process that had one.
        """
        said = self.gather(None if error is None else _packed(error))
        if error is not None:
            raise error
        for rank, one in enumerate(said):
            if one is not None:
                raise _unpacked(rank, one)

    def same(self, name: str, value: Any, hint: str) -> None:
        """Refuse values that are not the same in all processes.

        Args:
            name: How the error names the value.
            value: Of this process; plain.
            hint: What to do.

        Raises:
            InputError: In all processes.
        """
        found = self.gather(value)
        if any(other != found[0] for other in found):
            came = ", ".join(f"{other} in process {rank}" for rank, other in enumerate(found))
            raise InputError(expected(name, f"the same in all {self.count} processes", came, hint))


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
