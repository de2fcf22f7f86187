"""Progress bars, and the warning about a computation that will take long."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm import tqdm

from contrastive_curvature import validate

_T = TypeVar("_T")

_SHOW_AFTER = 10.0


class LongRunWarning(UserWarning):
    """A computation takes a time of order N^2, and N is large; the message gives a faster alternative."""


class Progress:
    """The progress of one computation, which may have several loops.

    Args:
        show: ``True`` shows bars from the start, ``None`` from the tenth second of the computation on, ``False`` never.
    """

    def __init__(self, show: bool | None = None) -> None:
        if show is not None:
            validate.flag("progress_bar", show)
        self._show = show
        self._start = time.monotonic()

    def bar(self, desc: str, total: int) -> Any:
        """Return a bar; the caller calls its ``update``."""
        return tqdm(desc=desc, total=total, **self._options())

    def over(self, items: Iterable[_T], desc: str) -> Iterable[_T]:
        """Iterate with a bar."""
        return tqdm(items, desc=desc, **self._options())

    def _options(self) -> dict[str, Any]:
        waited = time.monotonic() - self._start
        return {
            "disable": self._show is False,
            "delay": 0.0 if self._show else max(0.0, _SHOW_AFTER - waited),
            "leave": bool(self._show),
        }
