"""The first import of laplace-torch, without the warning that two packages it imports cause in torch.

``asdl`` and ``linear_operator`` call ``torch.jit.script`` when they are imported, which torch warns of. Users of this
package can do nothing about it. Only this one message is kept back, and only meanwhile: ``warnings.catch_warnings``
would also undo what another thread changes at the same time.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["without_the_warning_of_jit"]

_MESSAGE = r"`torch\.jit\.script` is deprecated"


@contextmanager
def without_the_warning_of_jit() -> Iterator[None]:
    """Keep torch's warning of ``torch.jit.script`` from the user inside ``with``; then the filters are as before."""
    own = ("ignore", re.compile(_MESSAGE, re.IGNORECASE), FutureWarning, None, 0)
    if own in warnings.filters:
        yield
        return
    warnings.filterwarnings("ignore", _MESSAGE, FutureWarning)
    filters = warnings.filters
    try:
        yield
    finally:
        # Another thread may be inside warnings.catch_warnings, which works on a copy of the list.
        for some in (filters, warnings.filters):
            with suppress(ValueError):
                some.remove(own)  # type: ignore[attr-defined]


with without_the_warning_of_jit():
    import laplace  # noqa: F401  the import itself is what this is for
