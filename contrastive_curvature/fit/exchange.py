"""The exchange of data between the processes of one fit."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist

from contrastive_curvature.errors import InputError, ProcessError

_log = logging.getLogger("contrastive_curvature")

_WAIT_QUIETLY = 30.0
"""Seconds after which a process says that it is waiting."""

T = TypeVar("T")


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block: half an exchange would leave the other processes waiting."""
    if threading.current_thread() is not threading.main_thread():
        # Python delivers Ctrl-C to the main thread only.
        yield
        return
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: asked.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        signal.raise_signal(signal.SIGINT)


class ProcessGroup:
    """The processes of torch's default group, as ``torchrun`` starts them.

    Every process sends with its data whether it has failed. So a process may fail anywhere inside :meth:`together`, and
    the others notice at their next :meth:`gather`.
    """

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._inside = self._over = self._lost = False

    def gather(self, own: T) -> list[T]:
        """Return the objects of all processes, in the order of the ranks. For a few numbers or inputs on the CPU."""
        return self._gathered(own)

    def merge(self, own: T, merge: Callable[[T, T], T]) -> T:
        """Return the objects of all processes, merged in the order of the ranks; only two are in memory at a time."""
        total: Any = None
        failure: BaseException | None = None
        with _interrupts_later():
            # Check that no process has failed; a process that fails from here on first completes the exchange.
            self._gathered(None)
            for source in range(self.count):
                box: list[Any] = [own if source == self.rank else None]
                self._wait(dist.broadcast_object_list, box, source)
                try:
                    if failure is None:
                        total = box[0] if source == 0 else merge(total, box[0])
                except BaseException as error:
                    # The others continue, and notice the failure at their next gather.
                    failure = error
        if failure is not None:
            raise failure
        return total

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make the block succeed in all processes or fail in all of them."""
        if self._inside:
            yield
            return
        token = _running.set(self)
        self._inside, self._over = True, False
        try:
            yield
            self._gathered(None)
        except BaseException as error:
            if not self._over:
                # Tell the others, so that they fail too instead of waiting.
                try:
                    self._gathered(None, failed=f"{type(error).__name__}: {error}")
                except ProcessError as other:
                    if self._lost:
                        error.add_note(str(other))
            raise
        finally:
            self._inside = False
            _running.reset(token)

    def _gathered(self, own: Any, *, failed: str = "") -> list[Any]:
        every: list[Any] = [None] * self.count
        with _interrupts_later():
            self._wait(dist.all_gather_object, every, (failed, own))
        others = [rank for rank, (reason, _) in enumerate(every) if reason]
        if others:
            self._over = True
            which = f"process {others[0]}" if len(others) == 1 else f"the processes {others[:10]}"
            raise ProcessError(
                f"the fit failed in {which} of {self.count}; its own error says why: {every[others[0]][0]}"
            )
        return [answer for _, answer in every]

    def _wait(self, operation: Callable[..., Any], *arguments: Any) -> None:
        """Run a collective operation."""
        said = "process %d of %d waits for the others: each of them has to fit"
        timer = threading.Timer(_WAIT_QUIETLY, _log.info, (said, self.rank, self.count))
        timer.daemon = True
        timer.start()
        try:
            operation(*arguments)
        except RuntimeError as error:
            self._over = self._lost = True
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise ProcessError(
                f"process {self.rank} of {self.count} lost the others during a fit: one has ended, does not fit "
                f"too, or needs longer than the timeout of init_process_group ({reason})"
            ) from error
        finally:
            timer.cancel()


_running: ContextVar[ProcessGroup | None] = ContextVar("contrastive_curvature_exchange", default=None)
"""The exchange of a fit that is under way."""


def current_exchange() -> ProcessGroup | None:
    """Return the processes of ``torch.distributed``'s default group; ``None`` if there is only one process."""
    running = _running.get()
    if running is not None:
        return running
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return ProcessGroup() if several else None


def check_agreed(
    exchange: ProcessGroup,
    facts: Mapping[str, str],
    hint: str = "All processes of one fit need the same encoder, options and earlier fits.",
) -> None:
    """Refuse a fit if these facts differ between the processes."""
    every = exchange.gather(dict(facts))
    for rank, other in enumerate(every):
        for name in dict.fromkeys([*every[0], *other]):
            first, here = every[0].get(name), other.get(name)
            if first != here:
                wanted = f"the same in all {exchange.count} processes"
                raise InputError(name, wanted, f"{first} in process 0, {here} in process {rank}", hint)
