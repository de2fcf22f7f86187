"""Whether what was noted of an encoder's layers is all that its parameters do, on a few points against autograd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.network.layer_parts import MatrixPart, Part
from contrastive_curvature.network.layer_points import Layout, candidates, fits, separates
from contrastive_curvature.network.layer_runs import Recorder, Run, Use
from contrastive_curvature.network.layer_tape import Gradients, Piece, Tape, make_pieces

__all__ = [
    "Layouts",
    "NotVerifiedError",
    "coarsest_dtype",
    "dense_gradient",
    "disagreeing",
    "few_points",
    "find_layouts",
    "with_layouts",
]

_POINTS = 5
"""A prime, so that an axis of this length is rarely one of positions."""


class NotVerifiedError(Exception):
    """A batch uses parameters in another way than the batch that was compared with autograd.

    Args:
        numbers: Of those parameters.
    """

    def __init__(self, numbers: set[int]) -> None:
        super().__init__(f"parameters {sorted(numbers)}")
        self.numbers = numbers


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
