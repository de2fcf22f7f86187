"""Progress bars, and the warning about a computation that will take long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import length_hint
from typing import TypeVar

from tqdm import tqdm

from contrastive_curvature import validate

_T = TypeVar("_T")

_SHOW_AFTER = 10.0


class LongRunWarning(UserWarning):
    """A computation takes a time of order N^2, and N is large; the message gives a faster alternative."""


class Progress:
    """The progress of one computation, which may have several loops.

    A terminal or a notebook shows bars. A log, which keeps every state of a bar, gets one line at the end.

    Args:
        show: ``True`` shows bars from the start, ``None`` from the tenth second of the computation on, ``False`` never.
            The line at the end follows the same rule.
    """

    def __init__(self, show: bool | None = None) -> None:
        if show is not None:
            validate.flag("progress_bar", show)
        self._show = show
        self._start = time.monotonic()

    @contextmanager
    def bar(self, desc: str, total: int | None, *, last: bool = True) -> Iterator[Callable[[int], object]]:
        """Yield a function of a number of further steps. A log gets no line of a loop that is not the ``last`` one."""
        redraws = sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel")
        if self._show is not False and redraws:
            delay = 0.0 if self._show else max(0.0, _SHOW_AFTER - self._seconds())
            with tqdm(desc=desc, total=total, delay=delay, leave=bool(self._show)) as bar:
                yield bar.update
            return
        # To make a bar that is not drawn takes as long as a small encoder.
        yield lambda _: None
        if self._show is not False and last and (self._show or self._seconds() >= _SHOW_AFTER):
            tqdm.write(f"{desc} done after {self._seconds():.0f} s", file=sys.stderr)

    def over(self, items: Iterable[_T], desc: str, *, last: bool = True) -> Iterator[_T]:
        """Iterate with a bar."""
        with self.bar(desc, length_hint(items) or None, last=last) as advance:
            for item in items:
                yield item
                advance(1)

    def _seconds(self) -> float:
        return time.monotonic() - self._start
