"""Progress bars, and a warning in advance when a computation will take long."""

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
_ESTIMATE_AFTER = 3.0
"""Seconds. Before that, the speed of a loop is too uncertain to predict its total time."""
_FEWEST_STEPS = 3
_OF_THE_ENCODER = (
    "The encoder and the reading of its inputs take this time, not the pairs. Faster: a GPU; worker processes of the "
    "loader; a random part of the data; for a last layer, features that are computed once for all fits (cc.features); "
    "for all parameters, subset_of_weights='last_layer'."
)
"""What helps where a pass over the data is slow."""


class LongRunWarning(UserWarning):
    """A computation will take more than a minute; the message gives the expected time and a faster alternative."""


class Progress:
    """The progress of one computation, which may have several loops.

    Args:
        show: ``True`` shows bars from the start, ``None`` from the tenth second of the computation on, ``False`` never.
        faster: How the user can avoid a long run, a sentence for the warning; for loops that are no pass over the data.
    """

    def __init__(self, show: bool | None = None, faster: str = "") -> None:
        self._show, self.faster = show, faster
        self._start = time.monotonic()
        self._warned = False

    @classmethod
    def of(cls, given: Progress | bool | None, faster: str = "") -> Progress:
        """``given`` itself if it is a :class:`Progress`, which joins its computation; otherwise a new one."""
        return given if isinstance(given, Progress) else cls(given, faster)

    def bar(self, desc: str, total: int | None = None) -> Any:
        """A bar whose ``update`` the caller calls."""
        return tqdm(desc=desc, total=total, **self._bar_options())

    def over(self, items: Iterable[_T], desc: str) -> Iterator[_T]:
        """Pass over the data with a bar, and warn as soon as the first batches show that the whole will take long."""
        total = _length(items)
        started: float | None = None
        for count, item in enumerate(tqdm(items, desc=desc, **self._bar_options())):
            if started is None:
                # The time before the first item is not typical: worker processes start and files are opened.
                started = time.monotonic()
            elif total is not None and count >= _FEWEST_STEPS:
                self.extrapolate(started, count, total, desc, _OF_THE_ENCODER)
            yield item

    def extrapolate(self, started: float, done: int, total: int, what: str, faster: str | None = None) -> None:
        """Warn of a long run if the speed of a loop so far predicts one.

        Args:
            started: Reading of ``time.monotonic()`` before the first step.
            done: Steps, or parts of the work, finished since then.
            total: Number of all steps or parts.
            what: Name of the computation, the subject of the warning.
            faster: See :meth:`expect`.
        """
        seconds = time.monotonic() - started
        if done and seconds >= _ESTIMATE_AFTER:
            self.expect(seconds / done * total, what, faster)

    def expect(self, seconds: float, what: str, faster: str | None = None) -> None:
        """Warn of a long run, once per computation.

        Args:
            seconds: Expected duration of the whole computation.
            what: Name of the computation, the subject of the warning.
            faster: What takes the time and what helps, where this is not what the constructor was told.
        """
        if seconds < _WARN_FROM or self._warned:
            return
        self._warned = True
        msg = (
            f"{what} will take about {_format_duration(seconds)}. {self.faster if faster is None else faster}".rstrip()
        )
        warnings.warn(msg, LongRunWarning, stacklevel=2)

    def _bar_options(self) -> dict[str, Any]:
        waited = time.monotonic() - self._start
        return {
            "disable": self._show is False,
            "delay": 0.0 if self._show else max(0.0, _SHOW_AFTER - waited),
            "leave": bool(self._show),
        }


def late_bar(items: Iterable[_T], desc: str) -> Iterable[_T]:
    """Iterate with a bar that appears after ten seconds and disappears at the end."""
    return tqdm(items, desc=desc, delay=_SHOW_AFTER, leave=False)


def _length(items: Iterable[Any]) -> int | None:
    try:
        return len(items)  # type: ignore[arg-type]
    except TypeError:  # torch's DataLoader always has __len__, which raises if its data set has no length
        return None


def _format_duration(seconds: float) -> str:
    for size, name in ((86400, "days"), (3600, "hours")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{max(1, round(seconds / 60))} minutes"
