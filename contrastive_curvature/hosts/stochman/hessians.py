"""What the Hessian calculators compute once the pairs have become weights: with respect to weights, or to inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.ggn.accumulate import make_blocks, points_curvature, tiled_cross_term
from contrastive_curvature.hessian.blocks import NodeBlocks
from contrastive_curvature.hosts.stochman.composite import Sequential
from contrastive_curvature.hosts.stochman.pullback import NetworkPullback, leaves
from contrastive_curvature.losses.weights import PairWeights
from contrastive_curvature.network import pullback as limits
from contrastive_curvature.network.pullback import Points
from contrastive_curvature.options import CurvatureOptions, Distance, Structure

__all__ = ["InputHessian", "WeightHessian"]


def _matrix(blocks: NodeBlocks, options: CurvatureOptions, approximate: bool) -> Tensor:
    """``M`` at the raw outputs, as the sweep begins."""
    # The released code normalises in the network for this distance: the sweep has cut off-diagonals there already.
    if approximate and options.distance is Distance.EUCLIDEAN:
        return blocks.diagonal()
    return blocks.dense()


def _width(network: Sequential, points: Points) -> int:
    """Largest number of values that the network holds for one point."""
    return max(t[0].numel() for t in network.feature_maps(points.context[:1])) if len(points) else 0


def _sweeps_matrices(network: Sequential, points: Points) -> bool:
    """Whether a matrix between layers is smaller than its factors, as many rows as there are outputs.

    ``M = B^T H B`` with ``B`` (D, O): with thousands of features between the layers of a convolutional network, ``M``
    of a single point does not fit in memory, and says no more than ``B`` does.
    """
    return _width(network, points) <= 2 * points.u.shape[1]


class WeightHessian:
    """With respect to the trainable parameters of a network that gives raw outputs.

    Args:
        network: The network.
        options: Distance and fix.
        speed: See :class:`~contrastive_curvature.hosts.stochman.HessianCalculator`.
    """

    def __init__(self, network: Sequential, options: CurvatureOptions, speed: str) -> None:
        self.network = network
        self.options = options
        self.speed = speed
        # By layer, weight and bias together.
        groups = [[p for p in leaf.parameters() if p.requires_grad] for leaf in leaves(network)]
        self.groups = [group for group in groups if group]
        self.pullback = NetworkPullback(network, [p for p in network.parameters() if p.requires_grad])

    def compute(self, points: Points, weights: PairWeights, shape: str) -> Tensor | list[Tensor]:
        """The Hessian of N points; see :meth:`HessianCalculator.compute_hessian`."""
        if self.pullback.shares and (shape == "block" or self.speed == "fast"):
            msg = (
                f"speed={self.speed!r}, shape={shape!r}: a parameter is shared between layers, and belongs to "
                "the block of none. Use speed='half' with shape='diagonal' or 'full'."
            )
            raise UnsupportedError(msg)
        structure = Structure.DIAG if shape == "diagonal" else Structure.FULL
        parts = [NetworkPullback(self.network, group) for group in self.groups] if shape == "block" else [self.pullback]
        if not self._sweeps(points):
            found = [points_curvature(part, points, weights, self.options, structure) for part in parts]
        else:
            blocks = make_blocks(points.u, points.n, *weights.node_sums(), self.options)
            found = self._sweep(points, blocks, shape)
            if self.options.pd_fix.coupled:
                cross = [tiled_cross_term(part, points, weights, structure) for part in parts]
                found = [block - c for block, c in zip(found, cross, strict=True)]
        return found if shape == "block" else found[0]

    def _sweeps(self, points: Points) -> bool:
        if self.speed == "half":
            return len(points) > 0 and not self.pullback.shares and _sweeps_matrices(self.network, points)
        return self.speed == "fast" and len(points) > 0

    def _sweep(self, points: Points, blocks: NodeBlocks, shape: str) -> list[Tensor]:
        """Sandwiches of the blocks ``H_ii``, over bounded numbers of points, for trainable parameters only."""
        approximate = self.speed == "fast"
        total: list[Tensor] = []
        step = max(1, limits.JACOBIAN_ELEMENTS // max(1, self._size(points, shape)))
        for start in range(0, len(points), step):
            rows = slice(start, start + step)
            m = _matrix(blocks[rows], self.options, approximate)
            found = self.network.sandwich(points.context[rows], m, shape, approximate)
            total = [a + b for a, b in zip(total, found, strict=True)] if total else found
        owners = leaves(self.network)
        if shape == "full":
            chosen = _chosen([p for leaf in owners for p in leaf.parameters()])
            return [t[chosen][:, chosen] for t in total] or [points.u.new_zeros(0, 0)]
        kept = []
        for leaf, t in zip(owners, total, strict=True):
            chosen = _chosen(list(leaf.parameters()))
            if len(chosen):
                kept.append(t[chosen] if shape == "diagonal" else t[chosen][:, chosen])
        return [torch.cat([points.u.new_zeros(0), *kept])] if shape == "diagonal" else kept

    def _size(self, points: Points, shape: str) -> int:
        """Numbers that the sweep holds for one point."""
        width = _width(self.network, points)
        counts = [sum(p.numel() for p in leaf.parameters()) for leaf in leaves(self.network)]
        held = {"diagonal": max([1, *counts]), "block": max([1, *counts]) ** 2, "full": sum(counts) ** 2}[shape]
        return width * (1 if self.speed == "fast" else width) + held


class InputHessian:
    """With respect to the inputs of every point.

    Args:
        network: The network, giving raw outputs.
        options: Distance and fix.
        speed: See :class:`~contrastive_curvature.hosts.stochman.HessianCalculator`.
    """

    def __init__(self, network: Sequential, options: CurvatureOptions, speed: str) -> None:
        self.network = network
        self.options = options
        self.speed = speed

    def compute(self, points: Points, weights: PairWeights, shape: str) -> Tensor:
        """The Hessian of N points; see :meth:`HessianCalculator.compute_hessian`.

        Points that a fix couples meet off the diagonal blocks alone, so only ``"full"`` has their terms.
        """
        x = points.context
        blocks = make_blocks(points.u, points.n, *weights.node_sums(), self.options)
        if shape == "diagonal":
            return self._per_point(points, blocks, shape).view_as(x)
        per_point = self._per_point(points, blocks, "block")
        if shape == "block":
            return per_point
        count, size = per_point.shape[:2]
        out = x.new_zeros(count, size, count, size)
        if self.options.pd_fix.coupled:
            dim = points.u.shape[1]
            a = self.network._walk(x, points.tangents(slice(0, dim)), lambda *_: None).flatten(2)
            out = -torch.einsum("ij,idk,jdl->ikjl", weights.dense(), a, a)
        index = torch.arange(count, device=x.device)
        out[index, :, index, :] += per_point
        return out.reshape(count * size, count * size)

    def _per_point(self, points: Points, blocks: NodeBlocks, shape: str) -> Tensor:
        x = points.context
        if self.speed == "fast" or (self.speed == "half" and _sweeps_matrices(self.network, points)):
            approximate = self.speed == "fast"
            return self.network.input_sandwich(x, _matrix(blocks, self.options, approximate), shape, approximate)
        dim = blocks.u.shape[1]
        eye = torch.eye(dim, dtype=blocks.u.dtype, device=blocks.u.device).expand(len(x), dim, dim)
        jacobian = self.network._walk(x, eye, lambda *_: None).flatten(2)
        curved = blocks.matmul(jacobian)
        return (jacobian * curved).sum(1) if shape == "diagonal" else jacobian.mT @ curved


def _chosen(params: list[nn.Parameter]) -> Tensor:
    """Positions of trainable entries among the joined parameters."""
    flags = [torch.full((p.numel(),), p.requires_grad, device=p.device) for p in params]
    return torch.cat(flags).nonzero().squeeze(1) if flags else torch.zeros(0, dtype=torch.long)
