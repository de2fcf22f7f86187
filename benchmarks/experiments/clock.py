"""Seconds of a fit that may be interrupted and started again, in other processes."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

from benchmarks.experiments.saved import read_json
from benchmarks.machine import write_atomically
from contrastive_curvature.errors import InputError


class Clock:
    """Adds up the time inside ``with``, over interruptions by an exception.

    A process that is killed cannot write what it took: the sum then is unknown, and stays so.

    Args:
        folder: Exists when the clock is started; the count stands in ``clock.json`` there.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "clock.json"
        self._started = 0.0

    @property
    def seconds(self) -> float | None:
        """The sum; ``None`` where a part of it is not known, or nothing was timed."""
        return self._read() if self._path.is_file() else None

    def __enter__(self) -> Clock:
        self._before: float | None = self._read() if self._path.is_file() else 0.0
        # What stands there until the end: unknown.
        self._write(None)
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        taken = time.perf_counter() - self._started
        self._write(None if self._before is None else self._before + taken)

    def _read(self) -> float | None:
        """What stands there; of a damaged file nothing is known."""
        try:
            seconds = read_json(self._path, "seconds", "").get("seconds")
        except InputError:
            return None
        return seconds if isinstance(seconds, float) and 0 <= seconds < math.inf else None

    def _write(self, seconds: float | None) -> None:
        write_atomically(self._path, json.dumps({"seconds": seconds}) + "\n")
