"""laplace-torch's backend by BackPACK."""

from __future__ import annotations

from typing import Any

from contrastive_curvature.hosts.backpack.passes import HostedEncoder
from contrastive_curvature.hosts.backpack.pullback import BackPackPullback
from contrastive_curvature.laplace.backends.base import ContrastiveBackend
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.network.threads import users_hooks

__all__ = ["BackPackContrastiveGGN"]


class BackPackContrastiveGGN(ContrastiveBackend):
    """Generalised Gauss-Newton of a pair loss by BackPACK's extensions; see :class:`ContrastiveBackend`.

    An encoder that BackPACK cannot differentiate is refused when it is fitted: a layer or a setting that it does not
    know, a function in the forward of a module, a layer that runs twice.
    """

    _known: tuple[Any, HostedEncoder] | None = None

    def all_parameters(self, encoder: Encoder) -> Pullback:
        """See :meth:`ContrastiveBackend.all_parameters`; looked at once, as long as the encoder is made of the same."""
        made_of, known = _parts(encoder), self._known
        made = BackPackPullback(encoder, known[1] if known is not None and known[0] == made_of else None)
        # Two threads may do this at once: each goes on with its own.
        self._known = made_of, made.hosted
        return made


def _parts(encoder: Encoder) -> tuple[Any, ...]:
    """What decides whether BackPACK can differentiate an encoder, besides the values of its parameters."""
    hooks = sum(len(users_hooks(m)) for m in encoder.modules())
    parameters = [(id(p), p.requires_grad) for p in encoder.parameters()]
    modules = [id(m) for m in encoder.modules()]
    return hooks, modules, parameters, [id(b) for b in encoder.buffers()], repr(encoder.model)
