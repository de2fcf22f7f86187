"""laplace-torch's backend by curvlinops."""

from __future__ import annotations

from typing_extensions import override

from contrastive_curvature.hosts.curvlinops.kfac import CurvlinopsPullback
from contrastive_curvature.laplace.backends.base import ContrastiveBackend
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.pullback import Pullback


class CurvlinopsContrastiveGGN(ContrastiveBackend):
    """Generalised Gauss-Newton of a pair loss by curvlinops; see :class:`ContrastiveBackend`.

    ``kron`` is curvlinops' K-FAC if the blocks are positive semidefinite and curvlinops knows the layers, otherwise the
    equal factors of :mod:`contrastive_curvature.network.layerwise`. ``diag`` and ``full`` come from the shared code,
    because an operator gives only one column at a time.
    """

    @override
    def all_parameters(self, encoder: Encoder) -> Pullback:
        return CurvlinopsPullback(encoder)
