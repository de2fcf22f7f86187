"""Seconds of a fit that may be interrupted and started again, in other processes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from contrastive_curvature.demo.report import write_atomically

__all__ = ["Clock"]


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
        seconds: float | None = self._read().get("seconds")
        return seconds

    def __enter__(self) -> Clock:
        before = self._read()
        self._before: float | None = 0.0 if not before else before["seconds"]
        # What stands there until the end: unknown.
        self._write(None)
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        taken = time.perf_counter() - self._started
        self._write(None if self._before is None else self._before + taken)

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8")) if self._path.is_file() else {}
        return found

    def _write(self, seconds: float | None) -> None:
        write_atomically(self._path, json.dumps({"seconds": seconds}) + "\n")
