"""Kronecker factors of the parameter curvature, for fixes whose output Hessian is block-diagonal.

A layer's weight gets ``G (x) A``: ``A = mean_i a_i a_i^T`` of its inputs and ``G = sum_i B_i^T H_ii B_i`` with the
Jacobian ``B_i`` of the raw outputs with respect to the layer's outputs. The approximation is that of K-FAC: inputs and
output curvature are taken as independent over the points (and, for convolutions, over the positions: K-FAC-expand). It
is exact for one point, or where all points share the inputs or the blocks. Biases and other vectors get their exact
block.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contrastive_curvature.encoder import Encoder, Inputs
from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.ggn.accumulate import clamp_curvature
from contrastive_curvature.ggn.module import ModulePullback
from contrastive_curvature.ggn.pullback import KronFactors, Points
from contrastive_curvature.node_blocks import NodeBlocks
from contrastive_curvature.options import Structure

__all__ = ["ModuleKron", "add_factors", "clamp_factors", "refuse_coupled_kron"]


def refuse_coupled_kron(pd_fix: object) -> None:
    """Say why a coupled fix has no Kronecker factors.

    Raises:
        UnsupportedError: Always.
    """
    msg = (
        f"structure 'kron' with pd_fix={str(pd_fix)!r}: the cross terms between two points are not a sum over points, "
        "and K-FAC has no factors for them. Use pd_fix='psd' or 'fixed', or the structure 'diag' or 'full'."
    )
    raise UnsupportedError(msg)


class ModuleKron:
    """Factors of every linear and convolutional layer of an encoder, by plain autograd.

    Args:
        encoder: The analysed encoder, in evaluation mode.

    Raises:
        UnsupportedError: A matrix parameter belongs to neither ``nn.Linear`` nor an ungrouped ``nn.Conv1d`` or
            ``nn.Conv2d``, or is shared.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        owners: dict[int, tuple[nn.Module, str]] = {}
        for module in encoder.modules():
            for name, p in module.named_parameters(recurse=False):
                if p.requires_grad and id(p) in owners:
                    self._refuse(f"the parameter {name!r} of a {type(module).__name__} is shared between modules")
                owners[id(p)] = (module, name)
        self.params = [p for p in encoder.parameters() if p.requires_grad]
        self.owners = [owners[id(p)] for p in self.params]
        for (module, name), p in zip(self.owners, self.params, strict=True):
            matrix_ok = isinstance(module, nn.Linear) or (
                isinstance(module, (nn.Conv1d, nn.Conv2d)) and module.groups == 1 and module.padding_mode == "zeros"
            )
            if p.ndim > 1 and not (matrix_ok and name == "weight"):
                self._refuse(f"{type(module).__name__}.{name} is not the weight of a linear or ungrouped convolution")
        self.layers = list(
            {id(m): m for (m, _), p in zip(self.owners, self.params, strict=True) if p.ndim > 1}.values()
        )

    def factors(self, x: Inputs, blocks: NodeBlocks, n_data: int) -> KronFactors:
        """Factors of a batch.

        Args:
            x: N points.
            blocks: Their Hessian blocks.
            n_data: Number of points over which the ``A`` are averaged.

        Returns:
            The factors; those of batches add up.
        """
        seen: dict[int, tuple[Tensor, Tensor]] = {}

        def note(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
            if id(module) in seen:
                self._refuse(f"a {type(module).__name__} runs more than once")
            seen[id(module)] = (args[0].detach().clone(), out)
            # What follows may work in place; the noted tensors must stay what they were.
            return out.clone()

        handles = [layer.register_forward_hook(note) for layer in self.layers]
        try:
            with torch.enable_grad():
                z = self.encoder(x)
        finally:
            for handle in handles:
                handle.remove()
        ran = [layer for layer in self.layers if id(layer) in seen]
        outs = [seen[id(layer)][1] for layer in ran]
        rows = [_gradients(z, k, outs) for k in range(z.shape[1])]
        # Jacobians of the raw outputs with respect to what a layer puts out, (N, D, positions, channels).
        jacobians = {
            id(layer): torch.stack([_by_position(layer, row[i]) for row in rows], dim=1) for i, layer in enumerate(ran)
        }
        factors: KronFactors = []
        for (module, _), p in zip(self.owners, self.params, strict=True):
            b = jacobians.get(id(module))
            if b is None and module in self.layers:
                # A layer that the encoder never runs has no curvature.
                sizes = (len(p),) if p.ndim == 1 else (len(p), p[0].numel())
                factors.append([p.new_zeros(size, size) for size in sizes])
            elif b is None:
                factors.append([self._vector_block(p, x, blocks)])
            elif p.ndim == 1:
                factors.append([_sandwich(b.sum(2, keepdim=True), blocks)])
            else:
                a = _layer_inputs(module, seen[id(module)][0]).flatten(0, 1)
                factors.append([_sandwich(b, blocks), a.T @ a / (n_data * b.shape[2])])
        return factors

    def _vector_block(self, p: nn.Parameter, x: Inputs, blocks: NodeBlocks) -> Tensor:
        """Exact block ``sum_i J_i^T H_ii J_i`` of a vector outside linear layers, such as the scale of a norm layer."""
        name = next(name for name, other in self.encoder.named_parameters() if other is p)
        pullback = ModulePullback(self.encoder, only={name})
        return pullback.block_term(Points(x, blocks.u, torch.ones_like(blocks.c)), blocks, Structure.FULL)

    @staticmethod
    def _refuse(why: str) -> None:
        msg = f"structure 'kron': {why}. Use the structure 'diag', or subset_of_weights='last_layer'."
        raise UnsupportedError(msg)


def add_factors(a: KronFactors | None, b: KronFactors) -> KronFactors:
    """Add the factors of two sets of points, factor by factor."""
    if a is None:
        return b
    return [[x + y for x, y in zip(f, g, strict=True)] for f, g in zip(a, b, strict=True)]


def clamp_factors(factors: KronFactors) -> KronFactors:
    """Set the negative eigenvalues of the curvature factors to zero; the input factors have none."""
    return [[clamp_curvature(f[0]), *f[1:]] for f in factors]


def _gradients(z: Tensor, k: int, outs: list[Tensor]) -> list[Tensor]:
    """Gradients of every point's output k with respect to what the layers put out; zero where it does not depend."""
    if not z.requires_grad:
        return [torch.zeros_like(out) for out in outs]
    axis = torch.zeros_like(z)
    axis[:, k] = 1
    found = torch.autograd.grad(z, outs, axis, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(out) if g is None else g for g, out in zip(found, outs, strict=True)]


def _sandwich(b: Tensor, blocks: NodeBlocks) -> Tensor:
    """``sum_i sum_t b_it^T H_ii b_it`` for ``b`` of shape (N, D, positions, channels)."""
    curved = blocks.matmul(b.flatten(2)).view_as(b)
    return torch.einsum("ndtc,ndte->ce", b, curved)


def _by_position(module: nn.Module, out: Tensor) -> Tensor:
    """(N, ..., C) of a linear layer or (N, C, ...) of a convolution as (N, positions, C)."""
    if isinstance(module, nn.Linear):
        return out.reshape(out.shape[0], math.prod(out.shape[1:-1]), out.shape[-1])
    return out.flatten(2).mT


def _layer_inputs(module: nn.Module, a: Tensor) -> Tensor:
    """What the weight is multiplied with at every position, shape (N, positions, inputs)."""
    if isinstance(module, nn.Linear):
        return _by_position(module, a)
    if not isinstance(module, (nn.Conv1d, nn.Conv2d)):
        msg = f"no weight inputs are known for a {type(module).__name__}"
        raise TypeError(msg)
    # Padding is applied first, so that 'same' needs no case of its own.
    a = F.pad(a, module._reversed_padding_repeated_twice)
    kernel, dilation, stride = module.kernel_size, module.dilation, module.stride
    if isinstance(module, nn.Conv1d):
        a = a.unsqueeze(2)
        kernel, dilation, stride = (1, *kernel), (1, *dilation), (1, *stride)
    return F.unfold(a, kernel, dilation, 0, stride).mT
