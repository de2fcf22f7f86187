"""How long a computation takes: said in advance where it is long, and shown while it runs."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from tqdm import tqdm

__all__ = ["LongRunWarning", "Progress", "late_bar"]

_T = TypeVar("_T")

_SHOW_AFTER = 10.0
_WARN_FROM = 60.0
_TRIAL = 3.0
"""Seconds after which the speed of a loop says how long the rest of it will take."""
_FEWEST_STEPS = 3


class LongRunWarning(UserWarning):
    """A computation will take more than a minute; the message says how long, and what would be faster."""


class Progress:
    """The progress of one computation, which may have several loops.

    Args:
        show: ``True``: bars from the start. ``None``: bars from the tenth second of the computation on. ``False``: no
            bars.
        faster: What the user can do about a long run, a sentence for the warning.
    """

    def __init__(self, show: bool | None = None, faster: str = "") -> None:
        self._show, self.faster = show, faster
        self._start = time.monotonic()
        self._warned = False

    @classmethod
    def of(cls, given: Progress | bool | None, faster: str = "") -> Progress:
        """The progress that a caller passes on, or a new one."""
        return given if isinstance(given, Progress) else cls(given, faster)

    def bar(self, desc: str, total: int | None = None) -> Any:
        """A bar to be moved by hand."""
        return tqdm(desc=desc, total=total, **self._how())

    def over(self, items: Iterable[_T], desc: str) -> Iterator[_T]:
        """Iterate under a bar, and warn once the first steps show that all of them will take long."""
        total = _length(items)
        started: float | None = None
        for count, item in enumerate(tqdm(items, desc=desc, **self._how())):
            if started is None:
                # Not before the first item: until then, worker processes start and files are opened.
                started = time.monotonic()
            elif total is not None and count >= _FEWEST_STEPS:
                self.extrapolate(started, count, total, desc)
            yield item

    def extrapolate(self, started: float, done: int, total: int, what: str) -> None:
        """Warn of a long run once the speed of a loop says how long the rest of it will take.

        Args:
            started: Reading of ``time.monotonic()`` before the first step.
            done: Steps, or parts of the work, taken since then.
            total: All of them.
            what: What takes so long.
        """
        seconds = time.monotonic() - started
        if done and seconds >= _TRIAL:
            self.expect(seconds / done * total, what)

    def expect(self, seconds: float, what: str) -> None:
        """Warn of a long run, once per computation.

        Args:
            seconds: How long it will take.
            what: What takes so long.
        """
        if seconds < _WARN_FROM or self._warned:
            return
        self._warned = True
        msg = f"{what} will take about {_in_words(seconds)}. {self.faster}".rstrip()
        warnings.warn(msg, LongRunWarning, stacklevel=2)

    def _how(self) -> dict[str, Any]:
        waited = time.monotonic() - self._start
        return {
            "disable": self._show is False,
            "delay": 0.0 if self._show else max(0.0, _SHOW_AFTER - waited),
            "leave": bool(self._show),
        }


def late_bar(items: Iterable[_T], desc: str) -> Iterable[_T]:
    """Iterate under a bar that shows itself after ten seconds, and goes when it is done."""
    return tqdm(items, desc=desc, delay=_SHOW_AFTER, leave=False)


def _length(items: Iterable[Any]) -> int | None:
    try:
        return len(items)  # type: ignore[arg-type]
    except TypeError:  # torch's DataLoader has a length in name only where its data set has none
        return None


def _in_words(seconds: float) -> str:
    for size, name in ((86400, "days"), (3600, "hours")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{max(1, round(seconds / 60))} minutes"
