"""The option ``mc_samples``: blocks of the output Hessian are sampled, which saves backward passes, without bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.hessian.blocks import Blocks, SampledBlocks
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.structures import STRUCTURES, Structure

Sampler = Callable[[Blocks, Pullback], Blocks]
"""From the blocks of points to those that are pulled back through a network."""


def make_sampler(mc_samples: int | None, generator: torch.Generator | None = None) -> Sampler | None:
    """Return a function that samples blocks with K samples, by default from the seed 0; ``None`` for exact blocks."""
    if mc_samples is None:
        return None
    source = torch.Generator().manual_seed(0) if generator is None else generator

    def sampled(blocks: Blocks, pullback: Pullback) -> Blocks:
        if not isinstance(pullback, LayerwisePullback):
            raise UnsupportedError(
                "mc_samples: it saves backward passes through a whole network, and these parameters need none, or "
                "belong to another host. Leave it out, or use backend=ContrastiveGGN with all parameters."
            )
        dim = blocks.u.shape[1]
        if mc_samples >= dim:
            wanted = f"fewer samples than the {dim} outputs, whose backward passes give the exact curvature"
            raise InputError("mc_samples", wanted, mc_samples, "Leave it out.")
        return SampledBlocks(blocks, mc_samples, source)

    return sampled


def term_of(
    structure: type[Structure], pullback: Pullback, context: Any, hessian: OutputHessian, sampler: Sampler | None = None
) -> Structure:
    """Return the unclamped curvature of points that are coupled only with each other."""
    if sampler is None:
        return structure.coupled_term(pullback, context, hessian)
    return structure.term(pullback, context, sampler(hessian.blocks, pullback))


def check_mc_samples(number: object, coupled: bool, structure: type[Structure] | None) -> None:
    """Refuse sampled blocks if there is no such estimate; ``structure`` is ``None`` if it is not known yet."""
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InputError("mc_samples", "None (exact) or a positive whole number", number)
    if coupled:
        raise UnsupportedError(
            "mc_samples with pd_fix='positive', 'full' or 'ggn': the samples are of each point's own block, and "
            "these fixes couple points. Use pd_fix='psd', 'fixed' or, for a loss with second derivatives, "
            "'ggn_fixed'; or leave mc_samples out."
        )
    if structure is not None and not structure.mc_estimable:
        known = " and ".join(repr(name) for name, kind in STRUCTURES.items() if kind.mc_estimable)
        raise UnsupportedError(f"mc_samples: only the structures {known} are estimated. Leave it out for the others.")
