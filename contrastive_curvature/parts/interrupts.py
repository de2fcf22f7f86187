"""Ctrl-C that takes effect a little later, so that processes stay in step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["interrupts_later"]


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Ctrl-C inside takes effect at the end; a second one at once.

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
