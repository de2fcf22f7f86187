"""What processes of one fit give each other; one process alone is the simplest case."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from contrastive_curvature.errors import ProcessError

__all__ = ["Alone", "Exchange", "ProcessGroup", "present_exchange"]

_FAILED = -1


class Exchange(ABC):
    """The processes of one fit.

    Attributes:
        rank: Of this one.
        count: How many there are.
    """

    rank: int
    count: int

    @abstractmethod
    def gather(self, make: Callable[[], bytes]) -> list[bytes]:
        """What every process made, in the order of the ranks; in every process.

        Args:
            make: Makes that of this process.

        Raises:
            ProcessError: It failed in another process, or one has gone. What fails in this process is raised as it is,
                after the others were told.
        """


class Alone(Exchange):
    """One process."""

    rank, count = 0, 1

    def gather(self, make: Callable[[], bytes]) -> list[bytes]:
        """See :meth:`Exchange.gather`."""
        return [make()]


class ProcessGroup(Exchange):
    """The processes of torch's default group, as ``torchrun`` starts them."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        # A group may have one backend for each device; what is exchanged comes from the CPU.
        on_cpu = "gloo" in str(dist.get_backend_config()) or "mpi" in str(dist.get_backend_config())
        self._device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def gather(self, make: Callable[[], bytes]) -> list[bytes]:
        """See :meth:`Exchange.gather`."""
        try:
            content = make()
        except BaseException as error:
            self._tell(error)
            raise
        lengths = self._all(torch.tensor([len(content)], device=self._device))
        self._check(lengths)
        longest = max(1, *(int(length) for length in lengths))
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        if content:
            padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)
        found = self._all(padded)
        return [bytes(part[: int(n)].cpu().numpy()) for part, n in zip(found, lengths, strict=True)]

    def _tell(self, error: BaseException) -> None:
        """Let the other processes fail with this one, instead of waiting for it."""
        try:
            self._all(torch.tensor([_FAILED], device=self._device))
        except ProcessError as other:
            # Somebody else has failed too; the own reason says more.
            error.add_note(str(other))

    def _check(self, lengths: list[Tensor]) -> None:
        failed = [rank for rank, length in enumerate(lengths) if int(length) == _FAILED]
        if failed:
            msg = f"the fit failed in process {failed[0]} of {self.count}; its own error says why"
            raise ProcessError(msg)

    def _all(self, mine: Tensor) -> list[Tensor]:
        found = [torch.empty_like(mine) for _ in range(self.count)]
        try:
            dist.all_gather(found, mine)
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            msg = f"process {self.rank} of {self.count} lost the others during a fit: {reason}"
            raise ProcessError(msg) from error
        return found


def present_exchange() -> Exchange:
    """The processes that this one belongs to: those of ``torch.distributed`` where its default group is initialised."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return ProcessGroup() if several else Alone()
