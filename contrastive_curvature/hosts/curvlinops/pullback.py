"""The pullback by curvlinops: its K-FAC where it has one."""

from __future__ import annotations

from typing import Any

import torch

from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hosts.curvlinops.kfac import host_factors, host_refuses, layer_positions, own_copy
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.network.pullback import KronFactors

__all__ = ["CurvlinopsPullback"]


class CurvlinopsPullback(LayerwisePullback):
    """All trainable parameters; Kronecker factors by curvlinops.

    Its operators give a diagonal or a matrix column by column only, so those come from the shared code.
    """

    def kron_factors(self, context: Any, blocks: Blocks, n_data: int) -> KronFactors:
        """See :meth:`Pullback.kron_factors`; the host's own where its squared loss can stand for the blocks."""
        if blocks.is_psd():
            few = self.slice_context(context, slice(0, 1))
            positions = layer_positions(self.encoder, few)
            # An unused layer has no gradient, which the host's backward pass trips over.
            if host_refuses(self.encoder, positions) is None and self._all_used(few):
                own = own_copy(self.encoder, few)
                if own is not None:
                    return host_factors(own, context, blocks, n_data, positions)
        return super().kron_factors(context, blocks, n_data)

    def _all_used(self, context: Any) -> bool:
        with torch.enable_grad():
            z = self._running(context)
            found = torch.autograd.grad(z.sum(), self.trainable, allow_unused=True)
        return all(g is not None for g in found)
