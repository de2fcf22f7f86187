"""Whether what was noted of an encoder's layers is all that its parameters do.

A few points tell where the points lie along the axes of what the layers put out (:func:`find_layouts`). Two backward
passes of a batch prove the rest (:func:`unproven`). For a random cotangent ``v``, the sum over points ``J_i^T v_i`` is
that of autograd: both sides are linear in ``v``, so that they are equal for every cotangent. And where a cotangent is a
multiple, another one for every point, the gradients at the layers are these multiples: every row is that of its point
alone. Together, every ``J_i`` is right, up to rounding, with probability one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.layer_parts import MatrixPart, Part
from contrastive_curvature.network.layer_tape import Gradients, Tape, gradients_at, make_pieces
from contrastive_curvature.network.pullback import own_name
from contrastive_curvature.network.recorder import Layout, Recorder, Run, Use, by_point, candidates, separates

_LEVELS = 16
"""Different multiples, powers of two, so that no rounding changes: from 1 to 2^-15. Up to 16 points all differ."""

_LEVELS_OF_HALF = 8
"""In half precision, whose smallest numbers are near."""

_STEERED = ("Embedding", "MaskedFill", "MaxPool", "ScaledDotProduct", "ValueSelectingReduction", "Where")
"""Operations that get integers or booleans from inputs, and still leave every point in its place."""

_TOLERANCE = 0.1
"""Of a row, relative to its largest entry; two different multiples differ by half or more."""


@dataclass(frozen=True)
class Layouts:
    """What a few points tell about an encoder; by default nothing is known.

    Args:
        places: Where the points lie at each use: by number of the parameter and of its use.
        lookups: Numbers of the embeddings whose tokens do not depend on the points.
        matrices: Numbers of the parameters that are one matrix for the inputs of every position, without groups.
        used: Numbers of the parameters that some function takes.
        gradients: Numbers that one gradient of a point at the outputs of all layers has.
        inputs: Numbers that the inputs of a point have.
        lacking: Numbers of the parameters that have a use without a rule.
    """

    places: Mapping[tuple[int, int], Layout] = field(default_factory=dict)
    lookups: frozenset[int] = frozenset()
    matrices: frozenset[int] = frozenset()
    used: frozenset[int] = frozenset()
    gradients: int = 1
    inputs: int = 0
    lacking: frozenset[int] = frozenset()


def find_layouts(encoder: Encoder, params: Sequence[Tensor], few: Inputs) -> Layouts:
    """Run a few points, and see where the gradients of one of them arrive.

    Args:
        encoder: The analysed encoder, in evaluation mode; gradients are enabled.
        params: Its trainable parameters.
        few: From :func:`.few_points`.
    """
    lookups: frozenset[int] = frozenset()
    while True:
        with Recorder(list(params), lookups) as recorder:
            z = encoder(few)
        places, without = _places(recorder.uses, z)
        tables = {use.selection.number for use in without if use.kind == "embedding"} - lookups
        if not tables:
            break
        lookups |= tables
    lacking = recorder.unknown | {use.selection.number for use in without}
    plain = encoder(few).detach()
    if not _agree(z.detach(), plain, plain, coarsest_dtype([use.run for use in recorder.uses], z.dtype)):
        # Every run gives other outputs.
        lacking = set(range(len(params)))
    pieces, wrong = make_pieces(recorder.uses, places, z, lacking)
    lacking |= wrong
    counts = Counter(piece.number for piece in pieces)
    matrices = {piece.number: piece.part for piece in pieces if isinstance(piece.part, MatrixPart)}
    runs = {id(run): run for piece in pieces for run in piece.runs}
    return Layouts(
        places,
        lookups,
        frozenset(k for k, m in matrices.items() if counts[k] == 1 and m.groups == 1 and m.entries is None),
        frozenset(use.selection.number for use in recorder.uses) | lacking,
        max(1, sum(run.shape.numel() for run in runs.values()) // len(z)),
        sum(p.part.inputs.numel() for p in pieces if isinstance(p.part, MatrixPart)) // len(z),
        frozenset(lacking),
    )


def _places(uses: Sequence[Use], z: Tensor) -> tuple[dict[tuple[int, int], Layout], list[Use]]:
    """Return where the points lie at every use, from the gradients that tell it, and the uses without such an axis."""
    n = len(z)
    of_first, of_others = _random_like(z, seed=0).repeat(2, 1, 1)
    of_first[1:], of_others[0] = 0, 0
    found = gradients_at(z, [use.run for use in uses], torch.stack([of_first, of_others]))
    places: dict[tuple[int, int], Layout] = {}
    without = []
    seen: Counter[int] = Counter()
    for use in uses:
        number, run = use.selection.number, id(use.run)
        possible = candidates(use.run.shape, use.run.axes, n)
        if run in found:
            possible = [c for c in possible if separates(c, n, *found[run])]
        if possible:
            places[number, seen[number]] = possible[0]
        else:
            without.append(use)
        seen[number] += 1
    return places, without


def unproven(tape: Tape, params: Sequence[Tensor], without: Collection[int] = ()) -> tuple[set[int], bool]:
    """Return the numbers of the parameters whose pieces do not give the Jacobian of every point.

    There are none where gradients overflow: such a curvature is refused later. And whether that holds for other values
    of parameters and inputs too: a gradient of zero everywhere agrees with anything.

    Args:
        tape: A run of n points; gradients are enabled.
        params: The trainable parameters.
        without: Numbers of those that are computed in another way.
    """
    tracked = [k for k, p in enumerate(params) if k not in without and p.numel()]
    z, n = tape.z, len(tape.z)
    if not z.requires_grad or not tracked or not n:
        return set(), False
    runs = {id(run): run for piece in tape.pieces for run in piece.runs}
    coarsest = coarsest_dtype(runs.values(), z.dtype)
    v = _random_like(z, seed=n)
    inputs: Any = [*(run.edge for run in runs.values()), *(params[k] for k in tracked)]
    found = torch.autograd.grad(z, inputs, v, retain_graph=True, allow_unused=True)
    one: Gradients = {key: g.to(z.dtype).unsqueeze(0) for key, g in zip(runs, found, strict=False) if g is not None}
    wanted = {
        k: torch.zeros_like(params[k]) if g is None else g for k, g in zip(tracked, found[len(runs) :], strict=True)
    }
    del found
    # Those of nn.Embedding(sparse=True) are sparse.
    flat = {k: (g.to_dense() if g.is_sparse else g).to(z.dtype).flatten() for k, g in wanted.items()}
    if not all(bool(g.isfinite().all()) for g in flat.values()):
        return set(), False
    telling = all(bool(g.any()) for g in one.values())
    terms: dict[int, list[tuple[Part, Tensor]]] = {k: [] for k in tracked}
    for piece, b in tape.reached(one):
        terms[piece.number].append((piece.part, b))
    wrong = {k for k, g in flat.items() if not _is_sum(terms[k], g, coarsest)}
    if n > 1 and runs:
        levels = _LEVELS if torch.finfo(coarsest).bits > 16 else _LEVELS_OF_HALF
        order = torch.randperm(-(-n // levels) * levels, generator=torch.Generator().manual_seed(n))[:n]
        multiples = torch.exp2(-(order % levels).double()).to(z)
        other = tape.gradients((v * multiples.unsqueeze(1)).unsqueeze(0))
        uses = {(id(use.run), use.layout): use for piece in tape.pieces for use in piece.uses if id(use.run) in one}
        mixed = {key for key, use in uses.items() if not _scales(one[key[0]][0], other[key[0]][0], use, multiples)}
        wrong |= {p.number for p in tape.pieces if any((id(use.run), use.layout) in mixed for use in p.uses)}
    return wrong, telling


def graph_key(tape: Tape, params: Sequence[Tensor]) -> int | None:
    """Return a number for the operations of a run: their order, all their options, and where parameters enter.

    Two runs with the same number agree with autograd alike, whatever the parameters and inputs are.

    Returns:
        ``None`` where values of the inputs can move points (indices do), or where an operation hides what it does.
    """
    places = {id(p): k for k, p in enumerate(params)}
    order: dict[Any, int] = {}
    waiting = [tape.z.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in order:
            order[node] = len(order)
            waiting += [child for child, _ in node.next_functions]
    found: list[Any] = []
    for node in order:
        name = node.name()
        if name == "torch::autograd::AccumulateGrad":
            found.append(places.get(id(node.variable)))
            continue
        if "::" in name or isinstance(node, torch.autograd.function.BackwardCFunction):
            return None
        options = []
        for option in _option_names(node.__class__):
            value = getattr(node, option)
            tensors = [t for t in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(t, Tensor)]
            if not all(t.is_floating_point() or name.startswith(_STEERED) for t in tensors):
                return None
            options.append(None if tensors else repr(value))
        found.append((name, *options, *((order.get(child), place) for child, place in node.next_functions)))
    uses = [use for piece in tape.pieces for use in piece.uses]
    found += [(use.selection.number, use.kind, use.shape, use.layout, order.get(use.run.edge.node)) for use in uses]
    return hash((len(tape.z), *found))


@cache
def _option_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_saved_")]


def _is_sum(terms: Sequence[tuple[Part, Tensor]], wanted: Tensor, coarsest: torch.dtype) -> bool:
    """Return whether the parts of a parameter add up to its gradient (size,)."""

    def total(absolute: bool) -> Tensor:
        out = torch.zeros_like(wanted)
        for part, b in terms:
            out[part.place] += part.total(b, absolute)
        return out

    found = total(absolute=False)
    # A gradient that is a cancellation has the rounding error of its terms.
    return _agree(found, wanted, wanted, coarsest) or _agree(found, wanted, total(absolute=True), coarsest)


def _scales(one: Tensor, other: Tensor, use: Use, multiples: Tensor) -> bool:
    """Return whether the rows of every point in ``other`` are its multiple of those in ``one``."""
    a, b = (by_point(t, use.layout, len(multiples)).flatten(1) for t in (one, other))
    if not a.numel():
        return True
    expected = a * multiples.unsqueeze(1)
    size = expected.abs().amax(1)
    # Rows whose numbers lose digits near the smallest one say nothing.
    kind = torch.finfo(use.run.dtype)
    ignored = kind.tiny * (16 if kind.bits == 16 else 1 / kind.eps)
    return bool(((b - expected).abs().amax(1) <= _TOLERANCE * size + ignored).all())


def _agree(found: Tensor, wanted: Tensor, size: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two tensors are equal up to rounding, relative to the largest entry of ``size``."""
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2)
    if wanted.is_cuda and dtype == torch.float32:
        # Convolutions and products may be rounded to the ten bits of TF32.
        tolerance = 1e-2
    if torch.is_autocast_enabled(wanted.device.type):
        tolerance = max(tolerance, 5e-2)
    return float((found - wanted).abs().amax()) <= tolerance * float(size.abs().amax())


def coarsest_dtype(runs: Iterable[Run], dtype: torch.dtype) -> torch.dtype:
    """Return the type of the outputs, or of a layer that autocast computes in fewer digits."""
    return max((dtype, *(run.dtype for run in runs)), key=lambda kind: torch.finfo(kind).eps)


def _random_like(z: Tensor, seed: int) -> Tensor:
    return torch.randn(z.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(z)


def refuse_gradients(encoder: nn.Module) -> None:
    """Refuse parameters whose gradients are no derivatives of the outputs.

    Raises:
        UnsupportedError: A complex parameter, or an embedding with ``scale_grad_by_freq``.
    """
    for name, p in encoder.named_parameters():
        if p.requires_grad and p.is_complex():
            raise UnsupportedError(
                f"model: the parameter {own_name(name)!r} is complex. Use two real parameters instead, or freeze it."
            )
    for name, module in encoder.named_modules():
        scaled = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.scale_grad_by_freq
        if scaled and module.weight.requires_grad:
            raise UnsupportedError(
                f"model: {own_name(name)!r} has scale_grad_by_freq=True: its gradients are no derivatives. Set False."
            )


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
        raise UnsupportedError(
            "model: its outputs depend on padded positions, where nn.TransformerEncoder puts zeros without gradients. "
            "Leave them out of the pooling, or use nn.TransformerEncoder(..., enable_nested_tensor=False)."
        )
