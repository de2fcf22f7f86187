"""The adapter for StochMan: its layers pull the output Hessian back."""

from __future__ import annotations

from contrastive_curvature.hosts.stochman.pullback import StochManPullback
from contrastive_curvature.laplace.backends.base import ContrastiveBackend
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.pullback import Pullback

__all__ = ["StochManContrastiveGGN"]


class StochManContrastiveGGN(ContrastiveBackend):
    """Generalised Gauss-Newton of the contrastive loss through StochMan's layers; see :class:`ContrastiveBackend`.

    The encoder is converted by :func:`~contrastive_curvature.hosts.stochman.to_nnj`, parameters shared; one with a
    layer that has no counterpart is refused when it is fitted.
    """

    def all_parameters(self, encoder: Encoder) -> Pullback:
        """See :meth:`ContrastiveBackend.all_parameters`."""
        return StochManPullback(encoder)
