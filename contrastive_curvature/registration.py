"""Everything that importing the package adds to other libraries, and its undoing."""

from contrastive_curvature import laplace
from contrastive_curvature.hosts import backpack

__all__ = ["register", "unregister"]


def register() -> None:
    """Make ``likelihood="contrastive"`` known to laplace-torch, and ``ContrastiveLoss`` and ``L2Norm`` to BackPACK.

    Does nothing when they already are.
    """
    laplace.register()
    backpack.register()


def unregister() -> None:
    """Put both hosts back as they were; does nothing when nothing is registered."""
    backpack.unregister()
    laplace.unregister()
