"""laplace-torch's backend by curvlinops."""

from __future__ import annotations

from typing_extensions import override

from contrastive_curvature.hosts.curvlinops.kfac import CurvlinopsPullback
from contrastive_curvature.laplace.backends.base import ContrastiveBackend
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.pullback import Pullback


class CurvlinopsContrastiveGGN(ContrastiveBackend):
    """Generalised Gauss-Newton of a pair loss by curvlinops; see :class:`ContrastiveBackend`.

    ``kron`` is curvlinops' K-FAC where the blocks are positive semidefinite and it knows the layers, else the equal
    factors of :mod:`contrastive_curvature.network.layerwise`; ``lowrank`` takes the products of
    :class:`~contrastive_curvature.hosts.curvlinops.ContrastiveGGNLinearOperator`. ``diag`` and ``full``, which an
    operator has column by column only, come from the shared code.
    """

    @override
    def all_parameters(self, encoder: Encoder) -> Pullback:
        return CurvlinopsPullback(encoder)
