"""laplace-torch's backend by BackPACK's derivatives."""

from __future__ import annotations

from contrastive_curvature.backends.backpack.pullback import BackPackPullback
from contrastive_curvature.backends.base import ContrastiveBackend
from contrastive_curvature.encoder import Encoder
from contrastive_curvature.ggn.pullback import Pullback

__all__ = ["BackPackContrastiveGGN"]


class BackPackContrastiveGGN(ContrastiveBackend):
    """Generalised Gauss-Newton of the contrastive loss by BackPACK; see :class:`ContrastiveBackend`.

    It knows fewer layers than :class:`~contrastive_curvature.backends.ContrastiveGGN`, and takes the diagonal of linear
    layers without a gradient of any point.
    """

    def all_parameters(self, encoder: Encoder) -> Pullback:
        """See :meth:`ContrastiveBackend.all_parameters`."""
        return BackPackPullback(encoder)
