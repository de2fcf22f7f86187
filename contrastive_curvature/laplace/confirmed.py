"""The state in which a posterior was last seen, by a look at all weights, to be that of its calibration.

That look reads every weight, which takes as long as the forward pass of one input. Between two predictions it is
enough that torch has seen no change (:class:`.Stamp`) and that some entries of every tensor are the same: whole tensors
may be written behind torch's back, as ``parameter.data`` allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contrastive_curvature.laplace.fingerprint import Stamp

__all__ = ["Confirmed"]

_SPOTS = 8
"""Entries of every parameter and buffer that are compared."""


class _Seen(NamedTuple):
    """A state that was looked at.

    Attributes:
        stamp: What torch knew of the posterior then.
        spots: Views of some entries of the encoder's parameters and buffers. While there are views of a tensor's
            memory, no other tensor can have its address.
        values: What the views held.
    """

    stamp: Stamp
    spots: list[Tensor]
    values: Tensor


class Confirmed:
    """Remembers one state, none at first; a copy remembers none, as it has another memory."""

    def __init__(self) -> None:
        self._seen: _Seen | None = None

    def holds(self, stamp: Stamp) -> bool:
        """Whether a posterior is in that state still, where ``stamp`` is of its present one."""
        seen = self._seen
        if seen is None or not seen.stamp.equals(stamp):
            return False
        with torch.no_grad():
            return torch.equal(torch.cat(seen.spots), seen.values)

    def remember(self, stamp: Stamp, la: Any) -> None:
        """Keep the present state, which was looked at; ``stamp`` is its."""
        try:
            with torch.no_grad():
                spots = list(_spots(la))
                self._seen = _Seen(stamp, spots, torch.cat(spots))
        except RuntimeError:
            # No entries, on several devices, or not in one piece of memory: every prediction looks at all of them.
            self._seen = None

    def __reduce__(self) -> Any:
        """A new one."""
        return Confirmed, ()


def _spots(la: Any) -> Iterator[Tensor]:
    """Views of entries at equal distances in the memory of all floating tensors."""
    for tensor in (*la.model.parameters(), *la.model.buffers()):
        if tensor.is_floating_point() and tensor.numel():
            extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            yield tensor.detach().as_strided((_SPOTS,), (extent // (_SPOTS - 1),), tensor.storage_offset())
