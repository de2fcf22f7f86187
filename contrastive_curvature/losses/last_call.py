"""What a loss was called with, for hosts that come back to it in the backward pass."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

__all__ = ["LastCall"]


class LastCall:
    """Labels and pairs of a call, kept as long as the embeddings of that call.

    A copy or a saved file of the loss has none.

    Args:
        z: The embeddings.
        labels: The labels, or ``None``.
        pairs: The pairs, or ``None``.
    """

    def __init__(self, z: Tensor | None = None, labels: Any = None, pairs: Any = None) -> None:
        self._given = labels, pairs
        self._z = None if z is None else weakref.ref(z, self._forget)

    def of(self, z: Tensor) -> tuple[Any, Any] | None:
        """Labels and pairs, if the call was one with this very tensor."""
        return self._given if self._z is not None and self._z() is z else None

    def _forget(self, _: Any) -> None:
        self._given = None, None

    def __reduce__(self) -> Any:
        return LastCall, ()
