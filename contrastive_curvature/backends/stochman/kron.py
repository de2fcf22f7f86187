"""Kronecker factors of linear and convolutional layers, from the same backward sweep as everything else.

The convention is that of :mod:`contrastive_curvature.ggn.kron`: ``G = sum_i sum_t b_it^T H_ii b_it`` over points and
positions, ``A`` the mean of ``a a^T`` over the same, biases and other vectors with their exact block.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from contrastive_curvature.backends.stochman import layers
from contrastive_curvature.backends.stochman.composite import Sequential
from contrastive_curvature.backends.stochman.layer import SandwichLayer
from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.ggn.pullback import KronFactors
from contrastive_curvature.node_blocks import NodeBlocks

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
                if id(p) in wanted and p.ndim > 1 and not _has_factors(module):
                    msg = (
                        f"structure 'kron': {type(module).__name__}.{name} is not the weight of a linear or ungrouped "
                        "convolution. Use the structure 'diag', or subset_of_weights='last_layer'."
                    )
                    raise UnsupportedError(msg)

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
            if _has_factors(leaf):
                by_position = b.flatten(3).mT if isinstance(leaf, layers._Convolution) else _positions(b, 2)
                inputs = leaf.patches(at).mT if isinstance(leaf, layers._Convolution) else _positions(at, 1)
                a = inputs.flatten(0, 1)
                found[id(leaf.weight)] = [_sandwich(by_position, blocks), a.T @ a / (n_data * inputs.shape[1])]
                if leaf.bias is not None:
                    found[id(leaf.bias)] = [_sandwich(by_position.sum(2, keepdim=True), blocks)]
                return
            sizes = [p.numel() for p in leaf.parameters()]
            jacobians = leaf._pull_weight(at, b).split(sizes, dim=2)
            for p, jacobian in zip(leaf.parameters(), jacobians, strict=True):
                if p.ndim <= 1:
                    found[id(p)] = [_sandwich(jacobian.unsqueeze(2), blocks)]

        dim = blocks.u.shape[1]
        eye = torch.eye(dim, dtype=blocks.u.dtype, device=blocks.u.device).expand(len(x), dim, dim)
        self.network._walk(x, eye, visit, to_input=False)
        return [found.get(id(p)) or [p.new_zeros(size, size) for size in _sizes(p)] for p in self.params]


def _has_factors(module: nn.Module) -> bool:
    if isinstance(module, layers.Linear):
        return True
    return isinstance(module, layers._Convolution) and module.groups == 1 and module.padding_mode == "zeros"


def _positions(t: Tensor, batch_axes: int) -> Tensor:
    """(B, ..., C) as (B, positions, C)."""
    return t.unsqueeze(batch_axes) if t.ndim == batch_axes + 1 else t.flatten(batch_axes, -2)


def _sandwich(b: Tensor, blocks: NodeBlocks) -> Tensor:
    """``sum_i sum_t b_it^T H_ii b_it`` for ``b`` of shape (N, D, positions, channels)."""
    curved = blocks.matmul(b.flatten(2)).view_as(b)
    return torch.einsum("ndtc,ndte->ce", b, curved)


def _sizes(p: Tensor) -> tuple[int, ...]:
    return (p.numel(),) if p.ndim <= 1 else (len(p), p[0].numel())
