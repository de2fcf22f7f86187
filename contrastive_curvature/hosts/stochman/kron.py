"""Kronecker factors of linear and convolutional layers, from the same backward sweep as everything else.

The convention is that of :mod:`contrastive_curvature.ggn.kron`: ``G = sum_i sum_t b_it^T H_ii b_it`` over points and
positions, ``A`` the mean of ``a a^T`` over the same, biases and other vectors with their exact block.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from contrastive_curvature.ggn.kron import check_matrix, has_factors, sandwich, zero_factors
from contrastive_curvature.hessian.blocks import NodeBlocks
from contrastive_curvature.hosts.stochman import layers
from contrastive_curvature.hosts.stochman.composite import Sequential
from contrastive_curvature.hosts.stochman.layer import SandwichLayer
from contrastive_curvature.network.pullback import KronFactors

__all__ = ["LayerKron"]


class LayerKron:
    """Factors of the parameters of a network in which no two layers share one.

    Args:
        network: The network.
        params: The parameters, in the order of the answer.

    Raises:
        UnsupportedError: A matrix parameter belongs to neither a linear layer nor an ungrouped convolution.
    """

    def __init__(self, network: Sequential, params: list[nn.Parameter]) -> None:
        self.network = network
        self.params = params
        wanted = {id(p) for p in params}
        for module in network.modules():
            for name, p in module.named_parameters(recurse=False):
                if id(p) in wanted:
                    check_matrix(module, name, p)

    def factors(self, x: Tensor, blocks: NodeBlocks, n_data: int) -> KronFactors:
        """Factors of a batch.

        Args:
            x: N points.
            blocks: Their Hessian blocks.
            n_data: Number of points over which the ``A`` are averaged.

        Returns:
            The factors; those of batches add up.
        """
        found: dict[int, list[Tensor]] = {}

        def visit(leaf: SandwichLayer, at: Tensor, b: Tensor) -> None:
            if has_factors(leaf):
                by_position = b.flatten(3).mT if isinstance(leaf, layers._Convolution) else _positions(b, 2)
                inputs = leaf.patches(at).mT if isinstance(leaf, layers._Convolution) else _positions(at, 1)
                a = inputs.flatten(0, 1)
                found[id(leaf.weight)] = [sandwich(by_position, blocks.matmul), a.T @ a / (n_data * inputs.shape[1])]
                if leaf.bias is not None:
                    found[id(leaf.bias)] = [sandwich(by_position.sum(2, keepdim=True), blocks.matmul)]
                return
            sizes = [p.numel() for p in leaf.parameters()]
            jacobians = leaf._pull_weight(at, b).split(sizes, dim=2)
            for p, jacobian in zip(leaf.parameters(), jacobians, strict=True):
                if p.ndim <= 1:
                    found[id(p)] = [sandwich(jacobian.unsqueeze(2), blocks.matmul)]

        dim = blocks.u.shape[1]
        eye = torch.eye(dim, dtype=blocks.u.dtype, device=blocks.u.device).expand(len(x), dim, dim)
        self.network._walk(x, eye, visit, to_input=False)
        return [found.get(id(p)) or zero_factors(p) for p in self.params]


def _positions(t: Tensor, batch_axes: int) -> Tensor:
    """(B, ..., C) as (B, positions, C)."""
    return t.unsqueeze(batch_axes) if t.ndim == batch_axes + 1 else t.flatten(batch_axes, -2)
