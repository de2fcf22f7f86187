"""Whether what was noted of an encoder's layers is all that its parameters do.

A few points tell where the points lie along the axes of what the layers put out (:func:`find_layouts`). Two backward
passes of a batch prove the rest (:func:`unproven`). For a random cotangent ``v``, the sum over points ``J_i^T v_i`` is
that of autograd: both sides are linear in ``v``, so that they are equal for every cotangent. And where a cotangent is a
multiple, another one for every point, the gradients at the layers are these multiples: every row is that of its point
alone. Together, every ``J_i`` is right, up to rounding, with probability one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.layer_parts import MatrixPart, Part
from contrastive_curvature.network.layer_tape import Gradients, NotVerifiedError, Tape, gradients_at, make_pieces
from contrastive_curvature.network.pullback import own_name
from contrastive_curvature.network.recorder import Layout, Recorder, Run, Use, by_point, candidates, separates

_LEVELS = 16
"""Different multiples, powers of two, so that no rounding changes: from 1 to 2^-15. Up to 16 points all differ."""

_LEVELS_OF_HALF = 8
"""In half precision, whose smallest numbers are near."""

_TOLERANCE = 0.1
"""Of a row, relative to its largest entry; two different multiples differ by half or more."""


@dataclass(frozen=True)
class Layouts:
    """What a few points tell about an encoder.

    Args:
        places: Where the points lie at each use: by number of the parameter and of its use.
        lookups: Numbers of the embeddings whose tokens do not depend on the points.
        matrices: Numbers of the parameters that are one matrix for the inputs of every position, without groups.
        used: Numbers of the parameters that some function takes.
        gradients: Numbers that one gradient of a point at the outputs of all layers has.
        inputs: Numbers that the inputs of a point have.
        lacking: Numbers of the parameters that have a use without a rule.
    """

    places: dict[tuple[int, int], Layout]
    lookups: frozenset[int]
    matrices: frozenset[int]
    used: frozenset[int]
    gradients: int
    inputs: int
    lacking: frozenset[int]


def find_layouts(encoder: Encoder, params: Sequence[Tensor], few: Inputs) -> Layouts:
    """Run a few points, and see where the gradients of one of them arrive.

    Args:
        encoder: The analysed encoder, in evaluation mode; gradients are enabled.
        params: Its trainable parameters.
        few: From :func:`.few_points`.
    """
    every = frozenset(range(len(params)))
    lookups: frozenset[int] = frozenset()
    tamed = False
    while True:
        with Recorder(list(params), lookups) as recorder:
            z = encoder(few)
        runs = [use.run for use in recorder.uses]
        v = _random_like(z, seed=0)
        of_first, of_others = v.clone(), v.clone()
        of_first[1:], of_others[0] = 0, 0
        first, others = gradients_at(z, runs, [of_first]), gradients_at(z, runs, [of_others])
        # A sum is finite only where all terms are, and takes a third of the time of asking each.
        finite = all(bool(g.sum().isfinite()) for found in (first, others) for (g,) in found.values())
        if not tamed and not (finite and bool(z.isfinite().all())):
            # Inputs that overflow say nothing about the layers; the curvature of their batch is refused later.
            few, tamed = _tamed(few), True
            continue
        places, without = _places(recorder.uses, len(z), first, others)
        tables = {use.selection.number for use in without if use.kind == "embedding"} - lookups
        if not tables:
            break
        lookups |= tables
    plain = encoder(few).detach()
    if not _agree(z.detach(), plain, float(plain.abs().amax()), coarsest_dtype(runs, z.dtype)):
        # Every run gives other outputs.
        return Layouts({}, frozenset(), frozenset(), every, 1, 1, every)
    lacking = recorder.unknown | {use.selection.number for use in without}
    while True:
        try:
            pieces = make_pieces(recorder.uses, places, z, lacking)
            break
        except NotVerifiedError as error:
            lacking |= error.numbers
    counts = Counter(piece.number for piece in pieces)
    matrices = {p.number: p.part for p in pieces if isinstance(p.part, MatrixPart)}
    distinct = {id(run): run for piece in pieces for run in piece.runs}
    return Layouts(
        places,
        lookups,
        frozenset(k for k, m in matrices.items() if counts[k] == 1 and m.groups == 1 and m.entries is None),
        frozenset(use.selection.number for use in recorder.uses) | lacking,
        max(1, sum(run.shape.numel() for run in distinct.values()) // len(z)),
        sum(p.part.inputs.numel() for p in pieces if isinstance(p.part, MatrixPart)) // len(z),
        frozenset(lacking),
    )


def _places(
    uses: Sequence[Use], n: int, first: Gradients, others: Gradients
) -> tuple[dict[tuple[int, int], Layout], list[Use]]:
    """Return where the points lie at every use, from the gradients that tell it, and the uses without such an axis."""
    places: dict[tuple[int, int], Layout] = {}
    without = []
    seen: Counter[int] = Counter()
    for use in uses:
        number, run = use.selection.number, id(use.run)
        possible = candidates(use.run.shape, use.run.axes, n)
        if run in first and run in others:
            possible = [c for c in possible if separates(c, n, first[run][0], others[run][0])]
        if possible:
            places[number, seen[number]] = possible[0]
        else:
            without.append(use)
        seen[number] += 1
    return places, without


def unproven(tape: Tape, params: Sequence[Tensor], without: Collection[int] = ()) -> set[int]:
    """Return the numbers of the parameters whose pieces do not give the Jacobian of every point.

    There are none where gradients overflow: such a curvature is refused later.

    Args:
        tape: A run of n points; gradients are enabled.
        params: The trainable parameters.
        without: Numbers of those that are computed in another way.
    """
    tracked = [k for k in range(len(params)) if k not in without]
    if not tape.z.requires_grad or not tracked or not len(tape.z):
        return set()
    z, n = tape.z, len(tape.z)
    runs = {id(run): run for piece in tape.pieces for run in piece.runs}
    coarsest = coarsest_dtype(runs.values(), z.dtype)
    v = _random_like(z, seed=n)
    edges = [run.edge for run in runs.values()]
    inputs: Any = [*edges, *(params[k] for k in tracked)]
    found = torch.autograd.grad(z, inputs, v, retain_graph=True, allow_unused=True)
    one: Gradients = {key: [g] for key, g in zip(runs, found, strict=False) if g is not None}
    # Those of nn.Embedding(sparse=True) are sparse.
    wanted = {
        k: g.to_dense() if g is not None and g.is_sparse else g
        for k, g in zip(tracked, found[len(edges) :], strict=True)
    }
    del found
    if any(g is not None and not bool(g.isfinite().all()) for g in wanted.values()):
        return set()
    wrong = {k for k, g in wanted.items() if not _is_sum(tape, k, g, one, coarsest)}
    if n > 1 and edges:
        levels = _LEVELS if torch.finfo(coarsest).bits > 16 else _LEVELS_OF_HALF
        order = torch.randperm(-(-n // levels) * levels, generator=torch.Generator().manual_seed(n))[:n]
        multiples = torch.exp2(-(order % levels).double()).to(z)
        other = tape.gradients([v * multiples.unsqueeze(1)])
        seen: dict[tuple[int, Layout], bool] = {}
        for piece in tape.pieces:
            for use in piece.uses:
                key = id(use.run), use.layout
                if key[0] in one and key not in seen:
                    seen[key] = _scales(one[key[0]][0], other[key[0]][0], use.layout, multiples)
                if not seen.get(key, True):
                    wrong.add(piece.number)
    return wrong


def _is_sum(tape: Tape, number: int, wanted: Tensor | None, found: Gradients, coarsest: torch.dtype) -> bool:
    """Return whether the pieces of a parameter add up to its gradient."""
    parts: list[tuple[Part, Tensor]] = []
    for piece in tape.pieces:
        b = piece.gradients(found, len(tape.z), tape.z.dtype) if piece.number == number else None
        if b is not None:
            parts.append((piece.part, b))
    if wanted is None or not parts:
        return not any(bool(part.total(b).any()) for part, b in parts) and (wanted is None or not bool(wanted.any()))
    flat = wanted.flatten()
    if len(parts) == 1 and parts[0][0].entries is None:
        total = parts[0][0].total(parts[0][1])
    else:
        total = parts[0][1].new_zeros(flat.numel())
        for part, b in parts:
            total[slice(None) if part.entries is None else part.entries] += part.total(b)
    if not flat.numel() or _agree(total, flat, float(flat.abs().amax()), coarsest):
        return True
    # A gradient that is a cancellation has the rounding error of its terms.
    return _agree(total, flat, max(part.magnitude(b) for part, b in parts), coarsest)


def _scales(one: Tensor, other: Tensor, layout: Layout, multiples: Tensor) -> bool:
    """Return whether the rows of every point in ``other`` are its multiple of those in ``one``."""
    a, b = (by_point(t, layout, len(multiples)).flatten(1) for t in (one, other))
    if not a.numel():
        return True
    expected = a * multiples.unsqueeze(1).to(a)
    size = expected.abs().amax(1)
    # Rows whose numbers lose digits near the smallest one say nothing.
    kind = torch.finfo(a.dtype)
    ignored = kind.tiny * (16 if kind.bits == 16 else 1 / kind.eps)
    return bool(((b - expected).abs().amax(1) <= _TOLERANCE * size + ignored).all())


def _agree(found: Tensor, wanted: Tensor, size: float, dtype: torch.dtype) -> bool:
    """Return whether two tensors are equal up to rounding, relative to the sum of their absolute terms."""
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2)
    if wanted.is_cuda and dtype == torch.float32:
        # Convolutions and products may be rounded to the ten bits of TF32.
        tolerance = 1e-2
    if torch.is_autocast_enabled(wanted.device.type):
        tolerance = max(tolerance, 5e-2)
    return float((found - wanted).abs().amax()) <= tolerance * size


def coarsest_dtype(runs: Iterable[Run], dtype: torch.dtype) -> torch.dtype:
    """Return the type of the outputs, or of a layer that autocast computes in fewer digits."""
    return max((dtype, *(run.dtype for run in runs)), key=lambda kind: torch.finfo(kind).eps)


def _random_like(z: Tensor, seed: int) -> Tensor:
    return torch.randn(z.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(z)


def _tamed(x: Inputs) -> Inputs:
    """Return inputs without infinite, missing and huge numbers."""
    if not isinstance(x, Tensor):
        return {k: _tamed(v) if isinstance(v, Tensor) else v for k, v in x.items()}
    return x.nan_to_num(0.0, 0.0, 0.0).clamp(-10, 10) if x.is_floating_point() else x


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
    """Refuse a transformer whose outputs ``z`` are others without gradients.

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
