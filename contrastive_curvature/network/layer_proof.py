"""Whether what was noted of a batch is all that the parameters do with it.

The first comparison with autograd (:mod:`contrastive_curvature.network.layer_proof`) tells where points lie. A network
may treat later batches in another way: it sorts them by length, leaves padding out, takes a branch with a function
that is not seen. Two backward passes of the batch itself exclude this. For a random cotangent ``v``, the sum over
points ``J_i^T v_i`` is that of autograd: both sides are linear in ``v``, so that they are equal for every cotangent.
And where a cotangent is a multiple, another one for every point, the gradients at the layers are these multiples:
every row is that of its point alone. Together, every ``J_i`` is right, up to rounding, with probability one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.network.layer_parts import MatrixPart, Part
from contrastive_curvature.network.layer_tape import Gradients, NotVerifiedError, Piece, Tape, make_pieces
from contrastive_curvature.network.pullback import own_name
from contrastive_curvature.network.recorder import Layout, Recorder, Run, Use, by_point, candidates, fits, separates

__all__ = [
    "Layouts",
    "check_fast_path",
    "coarsest_dtype",
    "dense_gradient",
    "disagreeing",
    "few_points",
    "find_layouts",
    "refuse_gradients",
    "unproven",
    "with_layouts",
]

_POINTS = 5
"""A prime, so that an axis of this length is rarely one of positions."""


@dataclass(frozen=True)
class Layouts:
    """What the comparison tells about an encoder.

    Args:
        places: Where the points lie at each use: by number of the parameter and of its use.
        lookups: Numbers of the embeddings whose tokens do not depend on the points.
        matrices: Numbers of the parameters that are one matrix for the inputs of every position, without groups.
        used: Numbers of the parameters that some function with a rule takes.
        gradients: Numbers that one gradient of a point at the outputs of all layers has.
        inputs: Numbers that the inputs of a point have.
        lacking: Numbers of the parameters that do not agree with autograd, or have a use without a rule.
    """

    places: dict[tuple[int, int], Layout]
    lookups: frozenset[int]
    matrices: frozenset[int]
    used: frozenset[int]
    gradients: int
    inputs: int
    lacking: frozenset[int]


def few_points(x: Inputs) -> Inputs:
    """Some points of a batch, repeated where there are too few."""
    n = input_length(x)
    if isinstance(x, Tensor):
        return x[torch.arange(_POINTS, device=x.device) % n]
    return {
        k: v[torch.arange(_POINTS, device=v.device) % n] if isinstance(v, Tensor) and v.ndim and v.shape[0] == n else v
        for k, v in x.items()
    }


def find_layouts(encoder: Encoder, params: Sequence[Tensor], few: Inputs) -> Layouts:
    """Run a few points, and compare the gradients of every parameter with those of autograd.

    Args:
        encoder: The analysed encoder, in evaluation mode; gradients are enabled.
        params: Its trainable parameters.
        few: From :func:`few_points`.

    Returns:
        What was noticed.
    """
    every = frozenset(range(len(params)))
    plain, v, wanted = _by_autograd(encoder, params, few)
    # A sum is finite only where all terms are, and takes a third of the time of asking each.
    if any(gradient is not None and not bool(gradient.sum().isfinite()) for gradient in wanted):
        # Inputs that overflow say nothing about the layers; the curvature of their batch is refused later.
        few = _tamed(few)
        plain, v, wanted = _by_autograd(encoder, params, few)
    lookups: frozenset[int] = frozenset()
    while True:
        with Recorder(list(params), lookups) as recorder:
            z = encoder(few)
        coarsest = coarsest_dtype((use.run for use in recorder.uses), z.dtype)
        if not _agree(z.detach(), plain.detach(), _largest(plain.detach()), coarsest):
            return Layouts({}, frozenset(), frozenset(), every, 1, 1, every)
        places, first, others, without = _places(recorder.uses, z, v)
        tables = {use.selection.number for use in without if use.kind == "embedding"} - lookups
        if not tables:
            break
        lookups |= tables
    lacking = recorder.unknown | {use.selection.number for use in without}
    try:
        uses = with_layouts(recorder.uses, places, len(z), frozenset(lacking))
    except NotVerifiedError as error:
        lacking |= error.numbers
        uses = with_layouts(recorder.uses, places, len(z), frozenset(lacking))
    pieces, failed = make_pieces(uses, len(z), z.dtype)
    both = {key: [a + b for a, b in zip(first[key], others[key], strict=True)] for key in first}
    lacking |= failed | disagreeing(pieces, both, wanted, every - lacking - failed, z, coarsest)
    counts = Counter(piece.number for piece in pieces)
    matrices = {
        piece.number
        for piece in pieces
        if counts[piece.number] == 1
        and isinstance(piece.part, MatrixPart)
        and piece.part.groups == 1
        and piece.part.entries is None
    }
    runs = {id(use.run): use.run for use, _ in uses}
    inputs = sum(piece.part.inputs.numel() for piece in pieces if isinstance(piece.part, MatrixPart))
    return Layouts(
        places,
        lookups,
        frozenset(matrices - lacking),
        frozenset(use.selection.number for use in recorder.uses) | recorder.unknown | lacking,
        max(1, sum(run.shape.numel() for run in runs.values()) // len(z)),
        inputs // len(z),
        frozenset(lacking),
    )


def coarsest_dtype(runs: Iterable[Run], dtype: torch.dtype) -> torch.dtype:
    """The type of the outputs, or of a layer that autocast computes in fewer digits."""
    return max((dtype, *(run.dtype for run in runs)), key=lambda kind: torch.finfo(kind).eps)


def _by_autograd(
    encoder: Encoder, params: Sequence[Tensor], few: Inputs
) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
    """Outputs, random cotangents of them, and the gradients of all parameters."""
    plain = encoder(few)
    v = torch.randn(plain.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(plain)
    if not plain.requires_grad:
        return plain, v, [None] * len(params)
    return plain, v, [dense_gradient(g) for g in torch.autograd.grad(plain, params, v, allow_unused=True)]


def dense_gradient(gradient: Tensor | None) -> Tensor | None:
    """A gradient that is no sparse tensor (those of ``nn.Embedding(sparse=True)`` are)."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _tamed(x: Inputs) -> Inputs:
    """Inputs without infinite, missing and huge numbers."""
    if not isinstance(x, Tensor):
        return {k: _tamed(v) if isinstance(v, Tensor) else v for k, v in x.items()}
    return x.nan_to_num(0.0, 0.0, 0.0).clamp(-10, 10) if x.is_floating_point() else x


def with_layouts(
    uses: Sequence[Use], places: Mapping[tuple[int, int], Layout], n: int, lacking: frozenset[int] = frozenset()
) -> list[tuple[Use, Layout]]:
    """The uses of a batch with where the points of each lie.

    Args:
        uses: Of n points.
        places: See :class:`Layouts`.
        n: Number of points.
        lacking: Numbers of parameters that are left out.

    Raises:
        NotVerifiedError: A use was not there when the encoder was compared, has another shape, or was overwritten.
    """
    out, wrong = [], set()
    seen: Counter[int] = Counter()
    for use in uses:
        number = use.selection.number
        if number in lacking:
            continue
        layout = places.get((number, seen[number]))
        seen[number] += 1
        if layout is None or layout.axis not in use.run.axes or not fits(use.run.shape, layout, n) or not use.intact():
            wrong.add(number)
        else:
            out.append((use, layout))
    if wrong:
        raise NotVerifiedError(wrong)
    return out


def _places(uses: Sequence[Use], z: Tensor, v: Tensor) -> tuple[dict[tuple[int, int], Layout], Any, Any, list[Use]]:
    """Where the points lie at every use, the gradients that tell it, and the uses without an axis of points."""
    tape = Tape(z, [Piece(0, _NO_PART, [(use, Layout(0)) for use in uses])])
    of_first, of_others = v.clone(), v.clone()
    of_first[1:], of_others[0] = 0, 0
    first, others = tape.gradients([of_first]), tape.gradients([of_others])
    places: dict[tuple[int, int], Layout] = {}
    without = []
    seen: Counter[int] = Counter()
    for use in uses:
        number = use.selection.number
        possible = candidates(use.run.shape, use.run.axes, len(z))
        pair = first.get(id(use.run)), others.get(id(use.run))
        if pair[0] is not None and pair[1] is not None:
            possible = [c for c in possible if separates(c, len(z), pair[0][0], pair[1][0])]
        if possible:
            places[number, seen[number]] = possible[0]
        else:
            without.append(use)
        seen[number] += 1
    return places, first, others, without


def disagreeing(
    pieces: Sequence[Piece],
    found: Gradients,
    wanted: Sequence[Tensor | None],
    numbers: frozenset[int],
    z: Tensor,
    coarsest: torch.dtype,
) -> set[int]:
    """The parameters whose gradients are not those of autograd.

    Args:
        pieces: Of a run.
        found: Its gradients of one cotangent.
        wanted: Those of the parameters, by autograd.
        numbers: Of the parameters to compare.
        z: The outputs (n, D) of the run.
        coarsest: From :func:`coarsest_dtype`.
    """
    by_number: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_number.setdefault(piece.number, []).append(piece)
    out = set()
    for number in numbers:
        gradient = wanted[number]
        parts = []
        for piece in by_number.get(number, []):
            b = piece.gradients(found, len(z), z.dtype)
            if b is not None:
                parts.append((piece.part, b))
        if gradient is None or not parts:
            if any(bool(part.total(b).any()) for part, b in parts) or (gradient is not None and bool(gradient.any())):
                out.add(number)
            continue
        total = _total(parts, gradient.numel())
        if not _agree(total, gradient.flatten(), _largest(gradient), coarsest):
            # A gradient that is a cancellation has the rounding error of its terms.
            size = max(part.magnitude(b) for part, b in parts)
            if not _agree(total, gradient.flatten(), size, coarsest):
                out.add(number)
    return out


def _largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def _total(parts: list[tuple[Part, Tensor]], size: int) -> Tensor:
    if len(parts) == 1 and parts[0][0].entries is None:
        return parts[0][0].total(parts[0][1])
    out = parts[0][1].new_zeros(size)
    for part, b in parts:
        out[slice(None) if part.entries is None else part.entries] += part.total(b)
    return out


def _agree(found: Tensor, wanted: Tensor, size: float, dtype: torch.dtype) -> bool:
    """Whether two tensors are equal up to rounding, relative to the sum of their absolute terms."""
    if not wanted.numel():
        return True
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2)
    if wanted.is_cuda and dtype == torch.float32:
        # Convolutions and products may be rounded to the ten bits of TF32.
        tolerance = 1e-2
    if torch.is_autocast_enabled(wanted.device.type):
        tolerance = max(tolerance, 5e-2)
    return float((found - wanted).abs().max()) <= tolerance * size


class _NoPart:
    """Only runs are asked for."""


_NO_PART: Any = _NoPart()


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
