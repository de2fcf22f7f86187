"""Parts of a network on top of any pullback: some entries of its parameters, or its last layer alone.

They let a host library that only knows whole modules answer for subnetworks and last layers too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.encoder import Encoder, Inputs
from contrastive_curvature.ggn.pullback import KronFactors, Points, Pullback
from contrastive_curvature.node_blocks import NodeBlocks
from contrastive_curvature.options import Structure

__all__ = ["HeadPullback", "SubnetworkPullback", "trainable_head"]


class SubnetworkPullback(Pullback):
    """Some entries of the parameters of another pullback.

    Args:
        inner: All trainable parameters.
        indices: Entries of the flattened parameters, shape (P,).
    """

    def __init__(self, inner: Pullback, indices: Tensor) -> None:
        self.inner = inner
        self.indices = indices
        self.n_params = indices.numel()

    @property
    def width(self) -> int:
        """See :class:`Pullback`."""
        return self.inner.width

    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        """See :meth:`Pullback.forward`."""
        return self.inner.forward(x)

    def slice_context(self, context: Any, rows: slice) -> Any:
        """See :meth:`Pullback.slice_context`."""
        return self.inner.slice_context(context, rows)

    def vjp(self, context: Any, cotangents: Tensor) -> Tensor:
        """See :meth:`Pullback.vjp`."""
        return self.inner.vjp(context, cotangents)[..., self.indices]

    def block_term(self, points: Points, blocks: NodeBlocks, structure: Structure) -> Tensor:
        """See :meth:`Pullback.block_term`."""
        if structure is Structure.DIAG:
            return self.inner.block_term(points, blocks, structure)[self.indices]
        return super().block_term(points, blocks, structure)

    def cross_term(self, rows: Points, columns: Points, y: Tensor, structure: Structure) -> Tensor:
        """See :meth:`Pullback.cross_term`."""
        if structure is Structure.DIAG:
            return self.inner.cross_term(rows, columns, y, structure)[self.indices]
        return super().cross_term(rows, columns, y, structure)


class HeadPullback(Pullback):
    """The last linear layer, by a pullback that sees it as a network of its own; the context is its input (N, F).

    Args:
        encoder: The analysed encoder, in evaluation mode.
        inner: A pullback to all parameters of :func:`trainable_head`.
    """

    def __init__(self, encoder: Encoder, inner: Pullback) -> None:
        self.encoder = encoder
        self.inner = inner
        self.n_params = inner.n_params

    @property
    def width(self) -> int:
        """See :class:`Pullback`."""
        return self.inner.width

    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        """See :meth:`Pullback.forward`."""
        with torch.no_grad():
            return self.encoder.features(x)

    def slice_context(self, context: Any, rows: slice) -> Any:
        """See :meth:`Pullback.slice_context`."""
        return context[rows]

    def vjp(self, context: Any, cotangents: Tensor) -> Tensor:
        """See :meth:`Pullback.vjp`."""
        return self.inner.vjp(context, cotangents)

    def block_term(self, points: Points, blocks: NodeBlocks, structure: Structure) -> Tensor:
        """See :meth:`Pullback.block_term`."""
        return self.inner.block_term(points, blocks, structure)

    def cross_term(self, rows: Points, columns: Points, y: Tensor, structure: Structure) -> Tensor:
        """See :meth:`Pullback.cross_term`."""
        return self.inner.cross_term(rows, columns, y, structure)

    def kron_factors(self, points: Points, blocks: NodeBlocks, n_data: int) -> KronFactors:
        """See :meth:`Pullback.kron_factors`."""
        return self.inner.kron_factors(points, blocks, n_data)


def trainable_head(encoder: Encoder, features: Tensor) -> Encoder:
    """The last layer as an encoder of features, with all its parameters trainable.

    Args:
        encoder: The analysed encoder.
        features: A few inputs (N, F) of the layer.

    Returns:
        An encoder whose parameters share the memory of the layer's.

    Raises:
        UnsupportedError: There is no last linear layer.
    """
    layer = encoder.require_last_layer()
    head = nn.utils.skip_init(nn.Linear, layer.in_features, layer.out_features, bias=layer.bias is not None)
    # A frozen layer has a curvature too.
    head.weight = nn.Parameter(layer.weight.detach())
    if layer.bias is not None:
        head.bias = nn.Parameter(layer.bias.detach())
    return Encoder(head.eval(), features)
