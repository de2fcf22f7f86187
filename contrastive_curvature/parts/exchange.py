"""What processes of one fit give each other; one process alone is the simplest case."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from contrastive_curvature.errors import InputError, ProcessError, expected

__all__ = ["ProcessGroup", "check_agreed", "present_exchange"]

_log = logging.getLogger("contrastive_curvature")

_FAILED = -1

_WAIT_QUIETLY = 30.0
"""Seconds after which a process says that it is waiting."""

_LONGEST_SLEEP = 0.01


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Let Ctrl-C inside take effect at the end; a second one at once.

    Python delivers it to the main thread only, so elsewhere there is nothing to do.
    """
    before = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(before):
        yield
        return
    asked: list[Any] = []

    def later(number: int, frame: Any) -> None:
        if asked:
            before(number, frame)
        asked.append(frame)

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        before(signal.SIGINT, asked[0])


class ProcessGroup:
    """The processes of torch's default group, as ``torchrun`` starts them.

    Every exchange begins with one number of each process: how many bytes follow, or that it has failed. So a process
    may fail anywhere, and the others see it at their next exchange, with as many messages received as sent.
    """

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._device = _exchange_device(dist.get_backend_config())
        self._inside = self._over = self._lost = False

    def gather(self, make: Callable[[], bytes]) -> list[bytes]:
        """Return what every process made, in the order of the ranks; in every process. For a few numbers or inputs."""
        with self._telling():
            content = make()
            lengths = self._lengths(len(content))
            mine = torch.zeros(max(1, *lengths), dtype=torch.uint8, device=self._device)
            _fill(mine[: len(content)], content)
            found = [torch.empty_like(mine) for _ in lengths]
            # That there was memory for it everywhere.
            self._lengths(0)
            self._all(found, mine)
            return [_bytes(part[:n]) for part, n in zip(found, lengths, strict=True)]

    def each(self, content: bytes, take: Callable[[bytes], None]) -> None:
        """Take what every process has, in the order of the ranks; only one of them is in memory besides the own one."""
        with self._telling():
            lengths = self._lengths(len(content))
            buffer = torch.empty(max(1, *lengths), dtype=torch.uint8, device=self._device)
            self._lengths(0)
            failure: BaseException | None = None
            with _interrupts_later():
                for source, length in enumerate(lengths):
                    part = buffer[:length]
                    try:
                        if source == self.rank:
                            _fill(part, content)
                    except BaseException as error:
                        failure = failure or error
                    if length:
                        self._wait(dist.broadcast, part, source)
                    try:
                        if failure is None:
                            take(content if source == self.rank else _bytes(part))
                    except BaseException as error:
                        # The others go on with the rest, and wait for this process there.
                        failure = error
            if failure is not None:
                raise failure

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let what is done inside succeed in all processes or fail in all of them."""
        if self._inside:
            yield
            return
        token = _running.set(self)
        try:
            with self._telling():
                yield
                self._lengths(0)
        finally:
            _running.reset(token)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Let the other processes fail with this one, instead of waiting for it."""
        if self._inside:
            yield
            return
        self._inside, self._over = True, False
        try:
            yield
        except BaseException as error:
            if not self._over:
                self._tell(error)
            raise
        finally:
            self._inside = False

    def _tell(self, error: BaseException) -> None:
        try:
            self._lengths(_FAILED)
        except ProcessError as other:
            if self._lost:
                error.add_note(str(other))

    def _lengths(self, mine: int) -> list[int]:
        """Return the numbers of all processes."""
        one = torch.tensor([mine], dtype=torch.int64, device=self._device)
        every = [torch.empty_like(one) for _ in range(self.count)]
        self._all(every, one)
        numbers = [int(number) for number in every]
        failed = [rank for rank, number in enumerate(numbers) if number == _FAILED]
        if failed:
            self._over = True
            which = f"process {failed[0]}" if len(failed) == 1 else f"the processes {failed[:10]}"
            msg = f"the fit failed in {which} of {self.count}; its own error says why"
            raise ProcessError(msg)
        return numbers

    def _all(self, found: list[Tensor], mine: Tensor) -> None:
        with _interrupts_later():
            self._wait(dist.all_gather, found, mine)

    def _wait(self, operation: Callable[..., Any], *arguments: Any) -> None:
        """Do an operation of all processes."""
        began, sleep, said = time.monotonic(), 1e-4, False
        try:
            work = operation(*arguments, async_op=True)
            while not work.is_completed():
                time.sleep(sleep)
                sleep = min(_LONGEST_SLEEP, 1.5 * sleep)
                if not said and time.monotonic() - began > _WAIT_QUIETLY:
                    said = True
                    _log.info("process %d of %d waits for the others: each of them has to fit", self.rank, self.count)
            work.wait()
        except RuntimeError as error:
            self._over = self._lost = True
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            msg = (
                f"process {self.rank} of {self.count} lost the others during a fit: one has ended, does not fit "
                f"too, or needs longer than the timeout of init_process_group ({reason})"
            )
            raise ProcessError(msg) from error
        except BaseException:
            # Half an operation: nobody can be told any more.
            self._over = self._lost = True
            raise


_running: ContextVar[ProcessGroup | None] = ContextVar("contrastive_curvature_exchange", default=None)
"""The exchange of a fit that is under way."""


def present_exchange() -> ProcessGroup | None:
    """Return the processes of ``torch.distributed``'s default group; ``None`` where this one is alone."""
    running = _running.get()
    if running is not None:
        return running
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return ProcessGroup() if several else None


def check_agreed(exchange: ProcessGroup, facts: Mapping[str, str]) -> None:
    """Refuse to fit together what differs between the processes."""
    every = [json.loads(text) for text in exchange.gather(lambda: json.dumps(dict(facts)).encode())]
    for rank, other in enumerate(every):
        for name in dict.fromkeys([*every[0], *other]):
            first, found = every[0].get(name), other.get(name)
            if first != found:
                wanted = f"the same in all {exchange.count} processes"
                hint = "All processes of one fit need the same encoder, options and earlier fits."
                raise InputError(expected(name, wanted, f"{first} in process 0, {found} in process {rank}", hint))


def _exchange_device(config: str) -> torch.device:
    """Return where the tensors that a group exchanges have to be: on the CPU, where one of its backends works there."""
    backends = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    if "cpu" in backends or not backends:
        return torch.device("cpu")
    kind = next(iter(backends))
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _fill(part: Tensor, content: bytes) -> None:
    found = np.frombuffer(content, dtype=np.uint8)
    if part.device.type == "cpu":
        part.numpy()[:] = found
    else:
        # torch wants memory that it could write to.
        part.copy_(torch.from_numpy(found.copy()))


def _bytes(part: Tensor) -> bytes:
    return part.cpu().numpy().tobytes()
