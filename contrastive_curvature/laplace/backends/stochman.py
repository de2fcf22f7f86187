"""The adapter for StochMan."""

from __future__ import annotations

from typing_extensions import override

from contrastive_curvature.hosts.stochman.sweep import StochManPullback
from contrastive_curvature.laplace.backends.base import ContrastiveBackend
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.pullback import Pullback


class StochManContrastiveGGN(ContrastiveBackend):
    """Generalised Gauss-Newton of the contrastive loss through StochMan's layers; see :class:`ContrastiveBackend`.

    The encoder is converted by :func:`~contrastive_curvature.hosts.stochman.to_nnj`, parameters shared; one with a
    layer that StochMan does not have is refused when it is fitted. The diagonal is StochMan's as far as its rules are
    exact (``docs/migration.md``); everything else is computed as :class:`ContrastiveGGN` does it.
    """

    @override
    def all_parameters(self, encoder: Encoder) -> Pullback:
        return StochManPullback(encoder)
