"""The pullback by curvlinops: its K-FAC where it has one."""

from __future__ import annotations

import torch

from contrastive_curvature.ggn.kron import ModuleKron
from contrastive_curvature.hessian.blocks import NodeBlocks
from contrastive_curvature.hosts.curvlinops.kfac import host_factors, host_refuses, own_copy
from contrastive_curvature.network.module import ModulePullback
from contrastive_curvature.network.pullback import KronFactors, Points

__all__ = ["CurvlinopsPullback"]


class CurvlinopsPullback(ModulePullback):
    """All trainable parameters; Kronecker factors by curvlinops.

    A matrix-free operator gives a diagonal only column by column, so diagonals and matrices come from Jacobians, as in
    laplace-torch's own adapter.
    """

    def kron_factors(self, points: Points, blocks: NodeBlocks, n_data: int) -> KronFactors:
        """See :meth:`Pullback.kron_factors`; the host's own where its squared loss can stand for the blocks."""
        kron = ModuleKron(self.encoder)
        # Refuses a layer that runs twice, of which the host would count one run.
        runs = kron.run(self.slice_context(points.context, slice(0, 1)))
        # An unused layer has no gradient, which the host's backward pass trips over.
        if blocks.is_psd() and host_refuses(self.encoder) is None and self._all_used(points):
            own = own_copy(self.encoder, self.slice_context(points.context, slice(0, 1)))
            if own is not None:
                named = dict(self.encoder.named_modules())
                positions = {id(m): runs[id(named[name])] for name, m in own.named_modules() if id(named[name]) in runs}
                return host_factors(own, points.context, blocks, n_data, positions)
        return kron.factors(points.context, blocks, n_data)

    def _all_used(self, points: Points) -> bool:
        with torch.enable_grad():
            z = self.encoder(self.slice_context(points.context, slice(0, 1)))
            trainable = [p for p in self.encoder.parameters() if p.requires_grad]
            found = torch.autograd.grad(z.sum(), trainable, allow_unused=True)
        return all(g is not None for g in found)
