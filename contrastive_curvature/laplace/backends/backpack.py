"""laplace-torch's backend by BackPACK's derivatives."""

from __future__ import annotations

from typing import Any

from contrastive_curvature.hosts.backpack.pullback import BackPackPullback
from contrastive_curvature.laplace.backends.base import ContrastiveBackend
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.network.threads import users_hooks

__all__ = ["BackPackContrastiveGGN"]


class BackPackContrastiveGGN(ContrastiveBackend):
    """Generalised Gauss-Newton of the contrastive loss by BackPACK; see :class:`ContrastiveBackend`.

    It knows fewer layers than :class:`~contrastive_curvature.ContrastiveGGN`, and takes the diagonal of linear layers
    without a gradient of any point.
    """

    _traced: tuple[Any, BackPackPullback] | None = None

    def all_parameters(self, encoder: Encoder) -> Pullback:
        """See :meth:`ContrastiveBackend.all_parameters`; traced once, as long as the encoder is made of the same."""
        made_of, traced = _parts(encoder), self._traced
        if traced is None or traced[0] != made_of:
            # Two threads may do this at once: each goes on with its own.
            self._traced = traced = made_of, BackPackPullback(encoder)
        return traced[1]


def _parts(encoder: Encoder) -> tuple[Any, ...]:
    """What a trace depends on besides the values of parameters."""
    hooks = sum(len(users_hooks(m)) for m in encoder.modules())
    parameters = [(id(p), p.requires_grad) for p in encoder.parameters()]
    modules = [id(m) for m in encoder.modules()]
    return hooks, modules, parameters, [id(b) for b in encoder.buffers()], repr(encoder.model)
