"""Ray while a job needs it, and what the processes of a job may take."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.io.jobs.packages import ray_data

__all__ = ["Ray", "Resources", "Stored"]

_log = logging.getLogger("contrastive_curvature")


@dataclass(frozen=True)
class Resources:
    """What the processes of a job may take.

    Args:
        workers: Number of processes; ``None`` for as many as Ray has room for.
        num_cpus: Cores of each.
        num_gpus: GPUs of each, perhaps a fraction.
        max_retries: How often a part is started again whose process has died.

    Raises:
        InputError: A number is out of range.
    """

    workers: int | None = None
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    max_retries: int = 3

    def __post_init__(self) -> None:
        if self.workers is not None:
            validate.count("workers", self.workers)
        validate.number("num_cpus", self.num_cpus, positive=True)
        validate.number("num_gpus", self.num_gpus)
        retries = self.max_retries
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise InputError(expected("max_retries", "a whole number >= 0", retries))

    def room(self, free: dict[str, float]) -> int:
        """How many processes fit into free cores and GPUs."""
        room = [free.get("CPU", 0.0) / self.num_cpus]
        room += [free.get("GPU", 0.0) / self.num_gpus] if self.num_gpus else []
        return int(min(room))

    def bounds(self, parts: int, free: dict[str, float]) -> tuple[int, int]:
        """Fewest and most processes for a number of parts, with what Ray has free now."""
        if self.workers is not None:
            return min(parts, self.workers), min(parts, self.workers)
        # A cluster that grows may have no room yet.
        return max(1, min(parts, self.room(free))), parts

    def check_room(self, whole: dict[str, float], *, grows: bool) -> None:
        """Refuse what no machine has, for which Ray would wait without end.

        Args:
            whole: Cores and GPUs of all machines.
            grows: Whether there may be more of them later; then it is only said.

        Raises:
            InputError: There is no room for one process.
        """
        if self.room(whole) >= 1:
            return
        there = f"{whole.get('CPU', 0.0):g} cores and {whole.get('GPU', 0.0):g} GPUs"
        text = expected("num_cpus, num_gpus", f"at most what Ray has, {there}", f"{self.num_cpus:g}, {self.num_gpus:g}")
        if not grows:
            raise InputError(text)
        _log.warning("%s Ray waits until the cluster has grown.", text)


class Ray:
    """Ray while it is needed: ``with Ray() as runtime: runtime.start(resources)``.

    What has been started here is stopped at the end, whatever happens; what was running before goes on.

    Raises:
        UnsupportedError: Ray is not installed.
    """

    def __init__(self) -> None:
        self._ray, _ = ray_data()
        self._started = False

    def start(self, resources: Resources) -> Any:
        """The module, once Ray runs.

        Args:
            resources: Of the processes to come.

        Raises:
            InputError: Ray has been started on this machine, which has no room for one.
        """
        if not self._ray.is_initialized():
            self._started = True
            self._ray.init()
        alone = self._started and "RAY_ADDRESS" not in os.environ
        resources.check_room(self._ray.cluster_resources(), grows=not alone)
        return self._ray

    def __enter__(self) -> Ray:
        return self

    def __exit__(self, *args: object) -> None:
        if self._started:
            self._ray.shutdown()


@dataclass(frozen=True)
class Stored:
    """Something large in Ray's store, that a process takes when it wants it.

    Args:
        reference: To it; ``None`` for nothing.
    """

    reference: Any

    def get(self) -> Any:
        """It, or ``None``."""
        if self.reference is None:
            return None
        ray, _ = ray_data()
        return ray.get(self.reference)
