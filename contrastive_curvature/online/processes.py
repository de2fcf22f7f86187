"""Communication between the processes (``torch.distributed``) that share one training, and so one checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import io
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from contrastive_curvature.fit.exchange import ProcessGroup
from contrastive_curvature.online.learner import OnlineLaplace

T = TypeVar("T")


class Processes(ProcessGroup):
    """The processes that share one training: several if ``torch.distributed`` runs and the step is shared, else one.

    Args:
        step: The module that is trained. It is shared if it contains a ``DistributedDataParallel``, which averages the
            gradients over all processes, or an ``OnlineLaplace``, which adds the curvatures of all processes.
    """

    def __init__(self, step: nn.Module) -> None:
        running = torch.distributed.is_available() and torch.distributed.is_initialized()
        if running and any(isinstance(module, (DistributedDataParallel, OnlineLaplace)) for module in step.modules()):
            super().__init__()
        else:
            self.rank, self.count = 0, 1

    def gather(self, mine: T) -> list[T]:
        """See :meth:`ProcessGroup.gather`."""
        return [mine] if self.count == 1 else super().gather(mine)

    def together(self) -> Any:
        """See :meth:`ProcessGroup.together`."""
        return contextlib.nullcontext() if self.count == 1 else super().together()

    def gather_states(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the states of all processes in the order of the ranks, with all tensors on the CPU."""
        raw = io.BytesIO()
        torch.save(mine, raw)
        files = self.gather(raw.getvalue())
        return [torch.load(io.BytesIO(file), map_location="cpu", weights_only=True) for file in files]

    def differences(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return entries of a state that differ from those of rank 0, such as the statistics of a batch norm."""
        if self.count == 1:
            return {}
        sums = {name: _digest(value) for name, value in state.items()}
        first = self.gather(sums)[0]
        return {name: state[name] for name, own in sums.items() if first.get(name) != own}


def _digest(value: Any) -> str:
    raw = io.BytesIO()
    torch.save(value.cpu() if isinstance(value, Tensor) else value, raw)
    return hashlib.blake2b(raw.getvalue()).hexdigest()
