"""The losses that BackPACK's extensions have to know by their class."""

from __future__ import annotations

from contrastive_curvature.losses.cosine import CosineLoss

__all__ = ["known_losses"]


def known_losses() -> set[type[CosineLoss]]:
    """All subclasses of :class:`~contrastive_curvature.losses.cosine.CosineLoss` that exist now, the user's too.

    BackPACK looks up a module's own class, not its bases.
    """
    found: set[type[CosineLoss]] = set()
    waiting: list[type[CosineLoss]] = [CosineLoss]  # type: ignore[type-abstract]
    while waiting:
        new = set(waiting.pop().__subclasses__()) - found
        found |= new
        waiting.extend(new)
    return found
