"""The losses that BackPACK's extensions have to know by their class."""

from __future__ import annotations

from contrastive_curvature.losses.base import PairLoss

__all__ = ["pair_losses"]


def pair_losses() -> set[type[PairLoss]]:
    """All subclasses of :class:`~contrastive_curvature.losses.PairLoss` that exist now, the user's too.

    BackPACK looks up a module's own class, not its bases.
    """
    found: set[type[PairLoss]] = set()
    waiting: list[type[PairLoss]] = [PairLoss]  # type: ignore[type-abstract]
    while waiting:
        new = set(waiting.pop().__subclasses__()) - found
        found |= new
        waiting.extend(new)
    return found
