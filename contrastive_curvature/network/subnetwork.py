"""Some entries of the parameters, on top of any pullback.

It lets a host library that only knows whole modules answer for subnetworks too.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.cross import CrossBlocks
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import Structure

__all__ = ["SubnetworkPullback"]


class SubnetworkPullback(Pullback):
    """Some entries of the parameters of another pullback.

    Args:
        inner: All trainable parameters.
        indices: Entries of the flattened parameters, shape (P,).
    """

    def __init__(self, inner: Pullback, indices: Tensor) -> None:
        self.inner = inner
        self.encoder = inner.encoder
        self.indices = indices
        self.n_params = indices.numel()

    @property
    def width(self) -> int:
        """See :class:`Pullback`."""
        return self.inner.width

    def parameter_at(self, position: int) -> str:
        """See :meth:`Pullback.parameter_at`."""
        return self.inner.parameter_at(int(self.indices[position]))

    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        """See :meth:`Pullback.forward`."""
        return self.inner.forward(x)

    def slice_context(self, context: Any, rows: slice) -> Any:
        """See :meth:`Pullback.slice_context`."""
        return self.inner.slice_context(context, rows)

    def vjp(self, context: Any, cotangents: Tensor) -> Tensor:
        """See :meth:`Pullback.vjp`."""
        return self.inner.vjp(context, cotangents)[..., self.indices]

    def block_term(self, context: Any, blocks: Blocks, structure: Structure) -> Tensor:
        """See :meth:`Pullback.block_term`."""
        if structure is Structure.DIAG:
            return self.inner.block_term(context, blocks, structure)[self.indices]
        return super().block_term(context, blocks, structure)

    def cross_term(self, rows: Any, columns: Any, cross: CrossBlocks, structure: Structure) -> Tensor:
        """See :meth:`Pullback.cross_term`."""
        if structure is Structure.DIAG:
            return self.inner.cross_term(rows, columns, cross, structure)[self.indices]
        return super().cross_term(rows, columns, cross, structure)

    def output_covariance(self, context: Any, variance: Tensor) -> Tensor:
        """See :meth:`Pullback.output_covariance`; the other parameters are known."""
        everywhere = variance.new_zeros(self.inner.n_params).index_copy(0, self.indices, variance)
        return self.inner.output_covariance(context, everywhere)

    def tile_size(self, structure: Structure, dim: int) -> int:
        """See :meth:`Pullback.tile_size`."""
        return self.inner.tile_size(structure, dim)
