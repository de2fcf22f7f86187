"""``mc_samples``: the curvature from a few random backward passes in place of one an output."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.hessian.blocks import Blocks, SampledBlocks
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.network.pullback import Pullback

__all__ = ["BlockSampler"]


@dataclass
class BlockSampler:
    """Replaces the blocks of the output Hessian by sampled ones, for an unbiased ``diag`` or ``kron``.

    Args:
        mc_samples: Number K of samples; ``None`` keeps the exact blocks.
        generator: Source of randomness on the CPU; ``None`` takes a fresh one with the seed 0.
    """

    mc_samples: int | None = None
    generator: torch.Generator | None = field(default=None)

    def __post_init__(self) -> None:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(0)

    def __call__(self, blocks: Blocks, pullback: Pullback) -> Blocks:
        """The blocks to pull back through a network.

        Raises:
            UnsupportedError: The parameters have a closed form, or another host's rules.
            InputError: As many samples as outputs, or more.
        """
        if self.mc_samples is None or self.generator is None:
            return blocks
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
