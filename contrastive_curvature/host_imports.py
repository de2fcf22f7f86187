"""The first import of laplace-torch, without the warning that two packages it imports cause in torch.

``asdl`` and ``linear_operator`` call ``torch.jit.script`` when they are imported; users can do nothing about it. The
filters that these packages add stay.
"""

import warnings
from contextlib import suppress

warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated", FutureWarning)
_ours = warnings.filters[0]
try:
    import laplace  # noqa: F401  the import itself is what this is for
finally:
    with suppress(ValueError):
        warnings.filters.remove(_ours)  # type: ignore[attr-defined]
