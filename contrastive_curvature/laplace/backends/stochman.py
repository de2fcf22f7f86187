"""laplace-torch's backend by StochMan."""

from __future__ import annotations

from typing_extensions import override

from contrastive_curvature.hosts.stochman.sweep import StochManPullback
from contrastive_curvature.laplace.backends.backend import ContrastiveBackend
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.pullback import Pullback


class StochManContrastiveGGN(ContrastiveBackend):
    """Generalised Gauss-Newton of the contrastive loss through StochMan's layers; see :class:`ContrastiveBackend`.

    :func:`~contrastive_curvature.hosts.stochman.to_nnj` converts the encoder and shares its parameters; ``fit`` refuses
    an encoder with a layer that StochMan does not have. StochMan computes the diagonal if its rules are exact
    (``docs/migration.md``); :class:`ContrastiveGGN` computes all other results.
    """

    @override
    def all_parameters(self, encoder: Encoder) -> Pullback:
        return StochManPullback(encoder)
