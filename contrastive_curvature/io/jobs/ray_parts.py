"""Parts of a job on Ray: which processes do them, and what becomes of a process that dies."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from contrastive_curvature.errors import ProcessError
from contrastive_curvature.io.jobs.packages import ray_data
from contrastive_curvature.io.jobs.ray_runtime import Resources, Stored
from contrastive_curvature.progress import Progress

__all__ = ["run_parts"]

_log = logging.getLogger("contrastive_curvature")

_GO_ON = (
    "What is done is kept: call this again with the same arguments, and only the rest is computed. A process that "
    "needs too much memory wants smaller batches, or more num_cpus, so that fewer run at once."
)


def run_parts(
    ray: Any, prepare: Any, parts: Sequence[int], resources: Resources, name: str, progress_bar: bool | None
) -> None:
    """Do every part in one of several processes; what it gives is written by it, nothing comes back.

    Args:
        ray: The module.
        prepare: Reference to a function that every process calls once; what it returns is called with every part.
        parts: Their indices.
        resources: Of the processes.
        name: What is done, for messages.
        progress_bar: Whether to show a progress bar.

    Raises:
        ProcessError: A process has died too often.
        Exception: What a part raised, as it is, with a note that names the part.
    """
    over: Any = Progress(progress_bar).over(_Done(ray, prepare, parts, resources, name), f"[{name}]")
    # Closed at once after an error, or the rest of the parts would go on.
    with closing(over) as done:
        for part, error in done:
            if error is not None:
                raise error
            _log.info("%s of part %d is done", name, part)


@dataclass(frozen=True)
class _Done:
    """Parts as they are done, with their errors."""

    ray: Any
    prepare: Any
    parts: Sequence[int]
    resources: Resources
    name: str

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[tuple[int, BaseException | None]]:
        ray, data = ray_data()
        context = data.DataContext.get_current()
        shown, context.enable_progress_bars = context.enable_progress_bars, False
        least, most = self.resources.bounds(len(self.parts), ray.available_resources())
        starts = _counter(ray)
        try:
            rows = data.from_items([{"part": part} for part in self.parts], override_num_blocks=len(self.parts))
            done = rows.map_batches(
                _Worker,
                batch_size=1,
                # Few, so that whoever is faster does more; with one alone Ray would not add processes later.
                compute=data.ActorPoolStrategy(min_size=least, max_size=most, max_tasks_in_flight_per_actor=2),
                fn_constructor_args=(Stored(self.prepare), self.name, starts, self.resources.max_retries),
                num_cpus=self.resources.num_cpus,
                num_gpus=self.resources.num_gpus or None,
            )
            for row in done.iter_rows():
                error = row["error"]
                yield int(row["part"]), ray.cloudpickle.loads(error) if error else None
        except ray.exceptions.RayError as error:
            msg = f"{self.name}: the processes could not start, or Ray has stopped: {error}\n{_GO_ON}"
            raise ProcessError(msg) from error
        finally:
            context.enable_progress_bars = shown
            # Which is gone where Ray has stopped.
            with suppress(Exception):
                ray.kill(starts)


def _counter(ray: Any) -> Any:
    """Counts how often each part was started, in a process of its own; Ray itself tries without end."""

    # Inside a function, so that its process need not import the library.
    class Starts:
        def __init__(self) -> None:
            self.counts: dict[int, int] = {}

        def start(self, part: int) -> int:
            self.counts[part] = self.counts.get(part, 0) + 1
            return self.counts[part]

    return ray.remote(num_cpus=0)(Starts).remote()


class _Worker:
    """One process: it holds what it needs for every part once."""

    def __init__(self, prepare: Stored, name: str, starts: Any, max_retries: int) -> None:
        self._prepare, self._name = prepare, name
        self._starts, self._max_retries = starts, max_retries
        self._work: Callable[[int], None] | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        outcomes = [self._outcome(int(part)) for part in batch["part"]]
        return {"part": batch["part"], "error": np.array(outcomes, dtype=object)}

    def _outcome(self, part: int) -> bytes:
        # Errors come back as results: a part that cannot be computed is not tried again.
        try:
            self._check_start(part)
            if self._work is None:
                self._work = self._prepare.get()()
            self._work(part)
        except Exception as error:
            return _pickled(error, f"{self._name} of part {part}, in a process of Ray:\n{traceback.format_exc()}")
        return b""

    def _check_start(self, part: int) -> None:
        ray, _ = ray_data()
        died = ray.get(self._starts.start.remote(part)) - 1
        if died > self._max_retries:
            msg = (
                f"{self._name}: the process that computed part {part} has died, {died} times (max_retries="
                f"{self._max_retries}). {_GO_ON}"
            )
            raise ProcessError(msg)


def _pickled(error: Exception, note: str) -> bytes:
    ray, _ = ray_data()
    error.add_note(note)
    with suppress(Exception):
        content: bytes = ray.cloudpickle.dumps(error)
        # Some errors can be pickled and not be read back.
        ray.cloudpickle.loads(content)
        return content
    plain = ProcessError(f"{type(error).__name__}: {error}")
    plain.add_note(note)
    other: bytes = ray.cloudpickle.dumps(plain)
    return other
