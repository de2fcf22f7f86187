"""Whether what was noted of a batch is all that the parameters do with it.

The first comparison with autograd (:mod:`contrastive_curvature.network.layer_check`) tells where points lie. A network
may treat later batches in another way: it sorts them by length, leaves padding out, takes a branch with a function
that is not seen. Two backward passes of the batch itself exclude this. For a random cotangent ``v``, the sum over
points ``J_i^T v_i`` is that of autograd: both sides are linear in ``v``, so that they are equal for every cotangent.
And where a cotangent is a multiple, another one for every point, the gradients at the layers are these multiples:
every row is that of its point alone. Together, every ``J_i`` is right, up to rounding, with probability one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.layer_check import coarsest_dtype, dense_gradient, disagreeing
from contrastive_curvature.network.layer_points import Layout, by_point
from contrastive_curvature.network.layer_tape import Gradients, Tape
from contrastive_curvature.network.pullback import own_name

__all__ = ["check_fast_path", "refuse_gradients", "unproven"]

_LEVELS = 16
"""Different multiples, powers of two, so that no rounding changes: from 1 to 2^-15. Up to 16 points all differ."""

_LEVELS_OF_HALF = 8
"""In half precision, whose smallest numbers are near."""

_TOLERANCE = 0.1
"""Of a row, relative to its largest entry; two different multiples differ by half or more."""


def refuse_gradients(encoder: nn.Module) -> None:
    """Refuse parameters whose gradients are no derivatives of the outputs.

    Raises:
        UnsupportedError: A complex parameter, or an embedding with ``scale_grad_by_freq``.
    """
    for name, p in encoder.named_parameters():
        if p.requires_grad and p.is_complex():
            msg = (
                f"model: the parameter {own_name(name)!r} is complex, so the outputs have no Jacobian with respect to "
                "it. Keep its real and imaginary part as a parameter each, or freeze it."
            )
            raise UnsupportedError(msg)
    for name, module in encoder.named_modules():
        scaled = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.scale_grad_by_freq
        if scaled and module.weight.requires_grad:
            msg = (
                f"model: {own_name(name)!r} has scale_grad_by_freq=True, which divides gradients by how often a batch "
                "has a token; they are no derivatives. Set it to False for the curvature."
            )
            raise UnsupportedError(msg)


def check_fast_path(encoder: nn.Module, x: Inputs, z: Tensor) -> None:
    """Refuse a transformer whose outputs are others without gradients.

    Args:
        encoder: The analysed encoder.
        x: A batch.
        z: Its outputs, with gradients.

    Raises:
        UnsupportedError: They are: without gradients, ``nn.TransformerEncoder`` puts zeros in padded positions.
    """
    if not any(isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)) for module in encoder.modules()):
        return
    with torch.no_grad():
        other = encoder(x)
    if bool((other - z).abs().amax() > 1e-2 * z.abs().amax()):
        msg = (
            "model: its outputs with and without gradients differ, because nn.TransformerEncoder puts zeros in padded "
            "positions where no gradients are asked for, and the outputs depend on these positions. Leave them out of "
            "the pooling, or use nn.TransformerEncoder(..., enable_nested_tensor=False)."
        )
        raise UnsupportedError(msg)


def unproven(tape: Tape, params: Sequence[Tensor], without: Collection[int] = ()) -> set[int]:
    """Numbers of the parameters whose pieces do not give the Jacobian of every point.

    Args:
        tape: A run of n points; gradients are enabled.
        params: The trainable parameters.
        without: Numbers of those that are computed in another way.

    Returns:
        Empty where everything is right, and where gradients overflow: such a curvature is refused later.
    """
    tracked = [k for k in range(len(params)) if k not in without]
    if not tape.z.requires_grad or not tracked or not len(tape.z):
        return set()
    z, n = tape.z, len(tape.z)
    runs = {id(run): run for piece in tape.pieces for run in piece.runs}
    coarsest = coarsest_dtype(runs.values(), z.dtype)
    generator = torch.Generator().manual_seed(n)
    v = torch.randn(z.shape, generator=generator, dtype=torch.float64).to(z)
    levels = _LEVELS if torch.finfo(coarsest).bits > 16 else _LEVELS_OF_HALF
    multiples = torch.exp2(-(torch.randperm(-(-n // levels) * levels, generator=generator)[:n] % levels).double()).to(z)
    edges = [run.edge for run in runs.values()]
    inputs: Any = [*edges, *(params[k] for k in tracked)]
    found = torch.autograd.grad(z, inputs, v, retain_graph=True, allow_unused=True)
    one: Gradients = {key: [g] for key, g in zip(runs, found, strict=False) if g is not None}
    wanted: list[Tensor | None] = [None] * len(params)
    for k, gradient in zip(tracked, found[len(edges) :], strict=True):
        wanted[k] = dense_gradient(gradient)
    if any(g is not None and not bool(g.isfinite().all()) for g in wanted):
        return set()
    wrong = disagreeing(tape.pieces, one, wanted, frozenset(tracked), z, coarsest)
    del wanted, found
    if n > 1 and edges:
        other = tape.gradients([v * multiples.unsqueeze(1)])
        seen: dict[tuple[int, Layout], bool] = {}
        for piece in tape.pieces:
            for use, layout in piece.uses:
                key = id(use.run), layout
                if key[0] not in one:
                    continue
                if key not in seen:
                    seen[key] = _scales(one[key[0]][0], other[key[0]][0], layout, multiples)
                if not seen[key]:
                    wrong.add(piece.number)
    return wrong


def _scales(one: Tensor, other: Tensor, layout: Layout, multiples: Tensor) -> bool:
    """Whether the rows of every point in ``other`` are its multiple of those in ``one``."""
    a, b = (by_point(t, layout, len(multiples)).flatten(1) for t in (one, other))
    if not a.numel():
        return True
    expected = a * multiples.unsqueeze(1).to(a)
    size = expected.abs().amax(1)
    # Rows whose numbers lose digits near the smallest one say nothing.
    kind = torch.finfo(a.dtype)
    ignored = kind.tiny * (16 if kind.bits == 16 else 1 / kind.eps)
    return bool(((b - expected).abs().amax(1) <= _TOLERANCE * size + ignored).all())
