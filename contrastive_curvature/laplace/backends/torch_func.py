"""The adapter that works for any encoder, by torch alone."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from contrastive_curvature.fit.api import make_pullback
from contrastive_curvature.laplace.backends.base import ContrastiveBackend
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.pullback import Pullback

__all__ = ["ContrastiveGGN"]


class ContrastiveGGN(ContrastiveBackend):
    """Generalised Gauss-Newton of a pair loss through any module; see :class:`ContrastiveBackend`."""

    keeps_graph: ClassVar[bool] = True

    def all_parameters(self, encoder: Encoder) -> Pullback:
        """See :meth:`ContrastiveBackend.all_parameters`."""
        return make_pullback(encoder, "all")

    def subnetwork_parameters(self, encoder: Encoder, indices: Tensor) -> Pullback:
        """Differentiates only the parameters that the entries lie in."""
        return make_pullback(encoder, indices)
