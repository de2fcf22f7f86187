"""A part of an evaluation that there is no data for."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Missing"]


@dataclass(frozen=True)
class Missing:
    """Stands where a part of an evaluation cannot be computed.

    Attributes:
        reason: Why, and what to do about it, in sentences.
    """

    reason: str
