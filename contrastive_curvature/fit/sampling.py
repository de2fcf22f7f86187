"""``mc_samples``: the curvature from a few random backward passes in place of one an output."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.sampled_blocks import SampledBlocks
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.options import Structure

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
        wanted = "None (exact) or a positive whole number"
        given = self.mc_samples
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise InputError(expected("mc_samples", wanted, given))
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(0)

    def check(self, coupled: bool, structure: Structure | None) -> None:
        """Refuse what has no such estimate, before anything is computed.

        Args:
            coupled: Whether the fix couples points.
            structure: Of the curvature; ``None`` for those without Kronecker factors, diagonal or matrix.

        Raises:
            UnsupportedError: A coupled fix, or another structure than ``diag`` and ``kron``.
        """
        if self.mc_samples is None:
            return
        if coupled:
            msg = (
                "mc_samples with pd_fix='positive', 'full' or 'ggn': the samples are of each point's own block, and "
                "these fixes couple points. Use pd_fix='psd', 'fixed' or, for a loss with second derivatives, "
                "'ggn_fixed'; or leave mc_samples out."
            )
            raise UnsupportedError(msg)
        if structure not in (Structure.DIAG, Structure.KRON):
            msg = "mc_samples: only the structures 'diag' and 'kron' are estimated. Leave it out for the others."
            raise UnsupportedError(msg)

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
