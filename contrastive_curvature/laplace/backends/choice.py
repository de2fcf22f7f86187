"""Which backend the Laplace classes take when the user names none: the fastest one that is exact for the model at hand.

``benchmarks/backends.py`` has the seconds behind the order. All backends give the same numbers, so the choice is one of
speed alone.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.laplace.backends.backpack import BackPackContrastiveGGN
from contrastive_curvature.laplace.backends.base import ContrastiveBackend
from contrastive_curvature.laplace.backends.torch_func import ContrastiveGGN
from contrastive_curvature.network.encoder import evaluation_mode
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.options import KFACApprox, Structure

__all__ = ["backend_named", "choose_backend"]

_log = logging.getLogger("contrastive_curvature")


def choose_backend(
    model: nn.Module,
    probe: Inputs,
    structure: Structure | None,
    last_layer: bool = False,
    keeps_graph: bool = False,
    **kwargs: Any,
) -> ContrastiveBackend:
    """Make the fastest backend that is exact, and say which in one line of the log (level info).

    Args:
        model: The encoder, or laplace's feature extractor around it.
        probe: A batch.
        structure: The Hessian structure; ``None`` for low rank and function space, which need products or Jacobians.
        last_layer: Only the last linear layer.
        keeps_graph: Whether predictions have to be differentiable.
        **kwargs: For the backend.

    Returns:
        The backend: ``ContrastiveGGN`` for a last layer (closed forms), for a differentiable prediction and for what
        BackPACK does not know, else ``BackPackContrastiveGGN``.
    """
    if last_layer:
        kind, why = ContrastiveGGN, "the last layer has closed forms"
    elif keeps_graph:
        kind, why = ContrastiveGGN, "enable_backprop=True needs its graph"
    elif kwargs.get("kfac_approx", KFACApprox.EXPAND) != KFACApprox.EXPAND:
        kind, why = ContrastiveGGN, "kfac_approx='reduce' takes all points of a layer at once"
    elif structure is None:
        kind, why = ContrastiveGGN, "this structure needs products, not diagonals"
    else:
        made = BackPackContrastiveGGN(model, **kwargs)
        try:
            with evaluation_mode(model), torch.no_grad():
                # Its first batch is compared with autograd, products too: some limits of the host show there only.
                made.pullback(probe).forward(probe)
        except UnsupportedError as error:
            kind, why = ContrastiveGGN, str(error).split(". Use ", 1)[0]
        else:
            _log.info("curvature by BackPackContrastiveGGN: exact for this encoder, and the fastest")
            return made
    _log.info("curvature by %s: %s", kind.__name__, why)
    return kind(model, last_layer=last_layer, **kwargs)


def backend_named(name: str) -> type[ContrastiveBackend]:
    """The class that :func:`choose_backend` chose, by its name."""
    return BackPackContrastiveGGN if name == BackPackContrastiveGGN.__name__ else ContrastiveGGN
