"""laplace-torch's backend by BackPACK."""

from __future__ import annotations

from typing_extensions import override

from contrastive_curvature.hosts.backpack.host_pullback import BackPackPullback
from contrastive_curvature.laplace.backends.backend import ContrastiveBackend
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.pullback import Pullback


class BackPackContrastiveGGN(ContrastiveBackend):
    """Generalised Gauss-Newton of a pair loss by BackPACK's extensions; see :class:`ContrastiveBackend`.

    ``fit`` refuses an encoder that BackPACK cannot differentiate: an unknown layer or setting, a function in the
    forward of a module, a layer that runs twice.
    """

    @override
    def all_parameters(self, encoder: Encoder) -> Pullback:
        return BackPackPullback(encoder)
