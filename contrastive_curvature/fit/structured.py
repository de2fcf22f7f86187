"""The curvature of points that are there at once, in any structure, and its estimates."""

from __future__ import annotations

from typing import Any

import torch

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.hessian.blocks import Blocks, SampledBlocks
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import Structure


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
    sampler: BlockSampler | None = None,
) -> Any:
    """Return the unclamped curvature of points that are there at once, in any structure."""
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
