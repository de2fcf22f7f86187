"""The curvature of points that are there at once, in any structure, and its estimates.

Kronecker factors can keep the cross terms of a pair: its two points as an axis that shares a layer's weight.

The exact block of a layer's weight over the pairs of a coupled fix is
``sum_{i<j} (B_i (x) a_i, B_j (x) a_j)^T H^{ij} (B_i (x) a_i, B_j (x) a_j)`` with the inputs ``a``, the Jacobians ``B``
of the raw outputs with respect to what the layer puts out, and the pair's own Hessian ``H^{ij}``. Two
approximations of it, after the K-FAC of layers with weight sharing:

- ``expand`` (:mod:`contrastive_curvature.network.kron`) drops the cross terms: ``G = sum_i B_i^T H_ii B_i``,
  ``A = mean_i a_i a_i^T``. It overstates a coupled curvature several times, since what it drops nearly cancels what it
  keeps (docs/theory.md, estimates and costs).
- ``reduce`` sums the two points first: ``G = sum_ij B_i^T H_ij B_j``, and ``A`` is the second moment of the pairs' mean
  inputs ``(a_i + a_j) / 2`` over all pairs of non-zero weight. Exact where all points have the same inputs.

Both are formed from sums over points, never from pairs. Positions of a convolution are treated one by one, as in
K-FAC-expand. Biases and other vectors get their exact block with ``reduce``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.hessian.blocks import Blocks, SampledBlocks
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.network.kron import LayerRun, coupled_factors, sandwich
from contrastive_curvature.network.last_layer import LastLayerPullback
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.network.pullback import KronFactors, Pullback
from contrastive_curvature.options import KFACApprox, Structure


class BlockSampler:
    """Replaces the blocks of the output Hessian by sampled ones, for an unbiased ``diag`` or ``kron``.

    Args:
        mc_samples: Number K of samples.
        generator: Source of randomness on the CPU; ``None`` takes a fresh one with the seed 0.
    """

    def __init__(self, mc_samples: int, generator: torch.Generator | None = None) -> None:
        self.mc_samples = mc_samples
        self.generator = torch.Generator().manual_seed(0) if generator is None else generator

    def __call__(self, blocks: Blocks, pullback: Pullback) -> Blocks:
        """Return the blocks to pull back through a network."""
        if not isinstance(pullback, LayerwisePullback):
            msg = (
                "mc_samples: it saves backward passes through a whole network, and these parameters need none, or "
                "belong to another host. Leave it out, or use backend=ContrastiveGGN with all parameters."
            )
            raise UnsupportedError(msg)
        dim = blocks.u.shape[1]
        if self.mc_samples >= dim:
            wanted = f"fewer samples than the {dim} outputs, whose backward passes give the exact curvature"
            raise InputError(expected("mc_samples", wanted, self.mc_samples, "Leave it out."))
        return SampledBlocks(blocks, self.mc_samples, self.generator)


def make_sampler(mc_samples: int | None, generator: torch.Generator | None = None) -> BlockSampler | None:
    """Return what samples blocks; ``None`` for exact ones."""
    return None if mc_samples is None else BlockSampler(mc_samples, generator)


def structured_curvature(
    pullback: Pullback,
    context: Any,
    hessian: OutputHessian,
    structure: Structure,
    n_data: int,
    approx: KFACApprox = KFACApprox.EXPAND,
    sampler: BlockSampler | None = None,
) -> Any:
    """Return the unclamped curvature of points that are there at once, in any structure."""
    if approx is not KFACApprox.EXPAND:
        return _shared_factors(pullback, context, hessian, n_data)
    if structure is Structure.KRON or sampler is not None:
        return block_curvature(pullback, context, hessian.blocks, structure, n_data, sampler)
    return pullback.curvature(context, hessian, structure)


def block_curvature(
    pullback: Pullback,
    context: Any,
    blocks: Blocks,
    structure: Structure,
    n_data: int = 1,
    sampler: BlockSampler | None = None,
) -> Any:
    """Return the unclamped curvature of points each by itself, in any structure."""
    if sampler is not None:
        blocks = sampler(blocks, pullback)
    if structure is Structure.KRON:
        return pullback.kron_factors(context, blocks, n_data)
    return pullback.block_term(context, blocks, structure)


def _shared_factors(pullback: Pullback, context: Any, hessian: OutputHessian, n_data: int) -> KronFactors:
    """Return the Kronecker factors of a batch with its cross terms (``reduce``)."""
    together = hessian.linked()
    share = len(hessian) / n_data

    def weight(run: LayerRun) -> list[Tensor]:
        return [sandwich(run.jacobian, hessian.matvec), share * _pair_moment(run.inputs, together)]

    def bias(run: LayerRun) -> Tensor:
        return sandwich(run.jacobian.sum(2, keepdim=True), hessian.matvec)

    if isinstance(pullback, LastLayerPullback):
        dim = hessian.z.shape[1]
        eye = torch.eye(dim, dtype=hessian.z.dtype, device=hessian.z.device).view(1, dim, 1, dim)
        run = LayerRun(context.unsqueeze(1), eye.expand(len(hessian), -1, -1, -1))
        moment = pullback.input_moment(context, _paired(context, together))
        of_weight = [sandwich(run.jacobian, hessian.matvec), *(share * part for part in moment)]
        return [of_weight, [bias(run)]] if pullback.bias else [of_weight]
    if not isinstance(pullback, LayerwisePullback):
        msg = (
            "kfac_approx='reduce': a subnetwork has no Kronecker factors, and a pullback of your own has those of each "
            "point alone. Use kfac_approx='expand', or backend=ContrastiveGGN with all parameters or the last layer."
        )
        raise UnsupportedError(msg)

    def vector(alone: Pullback) -> Tensor:
        return alone.curvature(context, hessian, Structure.FULL)

    return coupled_factors(pullback, context, weight, bias, vector)


def _pair_moment(a: Tensor, together: Tensor) -> Tensor:
    """Return the second moment of the mean inputs of pairs."""
    flat = a.transpose(0, 1).reshape(a.shape[1], a.shape[0], -1)
    return torch.einsum("tnf,tng->fg", flat, _paired(flat, together)) / a.shape[1]


def _paired(flat: Tensor, together: Tensor) -> Tensor:
    """Add to the inputs of every point those of its partners: ``flat^T paired`` is the moment of mean inputs."""
    degree = together.sum(1)
    if not bool(degree.any()):
        return flat / flat.shape[-2]
    return (degree.unsqueeze(1) * flat + together @ flat) / (2 * degree.sum())
