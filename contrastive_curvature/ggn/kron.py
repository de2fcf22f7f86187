"""Kronecker factors of the parameter curvature, every point on its own (``kfac_approx="expand"``).

A layer's weight gets ``G (x) A``: ``A = mean_i a_i a_i^T`` of its inputs and ``G = sum_i B_i^T H_ii B_i`` with the
Jacobian ``B_i`` of the raw outputs with respect to the layer's outputs. The approximation is that of K-FAC: inputs and
output curvature are taken as independent over the points (and, for convolutions, over the positions: K-FAC-expand). It
is exact for one point, or where all points share the inputs or the blocks. Biases and other vectors get their exact
block of what is kept.

Fixes whose output Hessian couples points have cross terms besides, which are left out here;
:mod:`contrastive_curvature.ggn.sharing` has approximations that keep them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.ggn.accumulate import clamp_curvature
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.module import ModulePullback
from contrastive_curvature.network.pullback import KronFactors
from contrastive_curvature.network.threads import watched
from contrastive_curvature.options import Structure

__all__ = [
    "LayerRun",
    "ModuleKron",
    "add_factors",
    "by_position",
    "check_matrix",
    "clamp_factors",
    "has_factors",
    "layer_inputs",
    "refuse_kron",
    "sandwich",
    "zero_factors",
]


@dataclass(frozen=True)
class LayerRun:
    """One run of a layer on N points.

    Args:
        inputs: What the weight is multiplied with at every position, shape (N, T, F).
        jacobian: Of the raw outputs with respect to what the layer puts out, shape (N, D, T, C).
    """

    inputs: Tensor
    jacobian: Tensor


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
                    refuse_kron(f"the parameter {name!r} of a {type(module).__name__} is shared between modules")
                owners[id(p)] = (module, name)
        self.params = [p for p in encoder.parameters() if p.requires_grad]
        self.owners = [owners[id(p)] for p in self.params]
        for (module, name), p in zip(self.owners, self.params, strict=True):
            check_matrix(module, name, p)
        self.layers = list(
            {id(m): m for (m, _), p in zip(self.owners, self.params, strict=True) if p.ndim > 1}.values()
        )

    def run(self, x: Inputs) -> dict[int, LayerRun]:
        """Run the encoder once and differentiate its outputs.

        Args:
            x: N points.

        Returns:
            By the ``id`` of every layer with a matrix parameter; layers that never run are left out.
        """
        seen: dict[int, tuple[Tensor, Tensor]] = {}

        def note(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
            if id(module) in seen:
                refuse_kron(f"a {type(module).__name__} runs more than once")
            seen[id(module)] = (args[0].detach().clone().to(module.weight.dtype), out)
            # What follows may work in place; the noted tensors must stay what they were.
            return out.clone()

        with watched(self.layers, after=note), torch.enable_grad():
            z = self.encoder(x)
        ran = [layer for layer in self.layers if id(layer) in seen]
        outs = [seen[id(layer)][1] for layer in ran]
        rows = [_gradients(z, k, outs) for k in range(z.shape[1])]
        # Jacobians of the raw outputs with respect to what a layer puts out, (N, D, positions, channels).
        return {
            id(layer): LayerRun(
                layer_inputs(layer, seen[id(layer)][0]),
                # Under autocast, a layer puts out half precision.
                torch.stack([by_position(layer, row[i]) for row in rows], dim=1).to(z.dtype),
            )
            for i, layer in enumerate(ran)
        }

    def factors(self, x: Inputs, blocks: Blocks, n_data: int) -> KronFactors:
        """Factors of a batch.

        Args:
            x: N points.
            blocks: Their Hessian blocks.
            n_data: Number of points over which the ``A`` are averaged.

        Returns:
            The factors; those of batches add up.
        """

        def layer(run: LayerRun) -> list[Tensor]:
            a = run.inputs.flatten(0, 1)
            return [sandwich(run.jacobian, blocks.matmul), a.T @ a / (n_data * run.jacobian.shape[2])]

        return self.assemble(
            self.run(x),
            layer,
            lambda run: sandwich(run.jacobian.sum(2, keepdim=True), blocks.matmul),
            lambda p: self._vector_block(p, x, blocks),
        )

    def assemble(
        self,
        runs: dict[int, LayerRun],
        of_weight: Callable[[LayerRun], list[Tensor]],
        of_bias: Callable[[LayerRun], Tensor],
        of_vector: Callable[[nn.Parameter], Tensor],
    ) -> KronFactors:
        """Factors in the order of the parameters.

        Args:
            runs: Of the layers.
            of_weight: ``[G, A]`` of a layer.
            of_bias: Block of its bias.
            of_vector: Block of a vector outside linear layers.

        Returns:
            The factors.
        """
        factors: KronFactors = []
        for (module, _), p in zip(self.owners, self.params, strict=True):
            run = runs.get(id(module))
            if run is None and module in self.layers:
                # A layer that the encoder never runs has no curvature.
                factors.append(zero_factors(p))
            elif run is None:
                factors.append([of_vector(p)])
            else:
                factors.append([of_bias(run)] if p.ndim == 1 else of_weight(run))
        return factors

    def vector_pullback(self, p: nn.Parameter) -> ModulePullback:
        """The pullback to a vector outside linear layers, such as the scale of a norm layer."""
        name = next(name for name, other in self.encoder.named_parameters() if other is p)
        return ModulePullback(self.encoder, only={name})

    def _vector_block(self, p: nn.Parameter, x: Inputs, blocks: Blocks) -> Tensor:
        """Exact block ``sum_i J_i^T H_ii J_i``."""
        pullback = self.vector_pullback(p)
        return pullback.block_term(x, blocks, Structure.FULL)


def refuse_kron(why: str) -> None:
    """Refuse what has no Kronecker factors.

    Raises:
        UnsupportedError: Always.
    """
    msg = f"structure 'kron': {why}. Use the structure 'diag', or subset_of_weights='last_layer'."
    raise UnsupportedError(msg)


def has_factors(module: nn.Module) -> bool:
    """Whether a module multiplies its inputs with its weight, position by position."""
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return module.groups == 1 and module.padding_mode == "zeros"
    return isinstance(module, nn.Linear)


def check_matrix(module: nn.Module, name: str, p: Tensor) -> None:
    """Refuse a matrix parameter that is no weight with factors; vectors pass.

    Raises:
        UnsupportedError: It is one.
    """
    if p.ndim > 1 and not (has_factors(module) and name == "weight"):
        refuse_kron(f"{type(module).__name__}.{name} is not the weight of a linear or ungrouped convolution")


def zero_factors(p: Tensor) -> list[Tensor]:
    """What a parameter without curvature has: ``[G, A]`` of a matrix, ``[block]`` of a vector."""
    sizes = (p.numel(),) if p.ndim <= 1 else (len(p), p[0].numel())
    return [p.new_zeros(size, size) for size in sizes]


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


def sandwich(b: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """``sum_t b_t^T H b_t`` (C, C), every position t on its own.

    Args:
        b: Jacobian, shape (N, D, T, C).
        product: ``v -> H v`` for ``v`` of shape (N, D, K).

    Returns:
        The curvature of what the layer puts out.
    """
    curved = product(b.flatten(2)).view_as(b)
    return torch.einsum("ndtc,ndte->ce", b, curved)


def by_position(module: nn.Module, out: Tensor) -> Tensor:
    """(N, ..., C) of a linear layer or (N, C, ...) of a convolution as (N, positions, C)."""
    if isinstance(module, nn.Linear):
        return out.reshape(out.shape[0], math.prod(out.shape[1:-1]), out.shape[-1])
    return out.flatten(2).mT


def layer_inputs(module: nn.Module, a: Tensor) -> Tensor:
    """What the weight is multiplied with at every position, shape (N, positions, inputs)."""
    if isinstance(module, nn.Linear):
        return by_position(module, a)
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
