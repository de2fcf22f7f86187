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
from contrastive_curvature.network.layer_parts import BlockJacobian, MatrixJacobian
from contrastive_curvature.network.layer_tape import Gradients, Tape, gradients_at, make_blocks
from contrastive_curvature.network.pullback import own_name
from contrastive_curvature.network.recorder import (
    BatchAxis,
    Call,
    ParameterUse,
    Recorder,
    by_point,
    possible_axes,
    separates,
)

_LEVELS = 16
"""Different multiples, powers of two, so that no rounding changes: from 1 to 2^-15. Up to 16 points all differ."""

_LEVELS_OF_HALF = 8
"""In half precision, whose smallest numbers are near."""

_STEERED = ("Embedding", "MaskedFill", "MaxPool", "ScaledDotProduct", "ValueSelectingReduction", "Where")
"""Operations that get integers or booleans from inputs, and still leave every point in its place."""

_TOLERANCE = 0.1
"""Of a row, relative to its largest entry; two different multiples differ by half or more."""


@dataclass(frozen=True)
class LayerAnalysis:
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

    places: Mapping[tuple[int, int], BatchAxis] = field(default_factory=dict)
    lookups: frozenset[int] = frozenset()
    matrices: frozenset[int] = frozenset()
    used: frozenset[int] = frozenset()
    gradients: int = 1
    inputs: int = 0
    lacking: frozenset[int] = frozenset()


def analyse_layers(encoder: Encoder, params: Sequence[Tensor], few: Inputs) -> LayerAnalysis:
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
        places, without = _batch_axes(recorder.uses, z)
        tables = {use.subset.number for use in without if use.kind == "embedding"} - lookups
        if not tables:
            break
        lookups |= tables
    lacking = recorder.unknown | {use.subset.number for use in without}
    plain = encoder(few).detach()
    if not bool(_agree(z.detach(), plain, plain, coarsest_dtype([use.call for use in recorder.uses], z.dtype))):
        # Every run of the encoder gives other outputs.
        lacking = set(range(len(params)))
    blocks, wrong = make_blocks(recorder.uses, places, z, lacking)
    lacking |= wrong
    counts = Counter(block.number for block in blocks)
    matrices = {block.number: block.jacobian for block in blocks if isinstance(block.jacobian, MatrixJacobian)}
    calls = {id(call): call for block in blocks for call in block.calls}
    return LayerAnalysis(
        places,
        lookups,
        frozenset(k for k, m in matrices.items() if counts[k] == 1 and m.groups == 1 and m.entries is None),
        frozenset(use.subset.number for use in recorder.uses) | lacking,
        max(1, sum(call.shape.numel() for call in calls.values()) // len(z)),
        sum(p.jacobian.inputs.numel() for p in blocks if isinstance(p.jacobian, MatrixJacobian)) // len(z),
        frozenset(lacking),
    )


def _batch_axes(uses: Sequence[ParameterUse], z: Tensor) -> tuple[dict[tuple[int, int], BatchAxis], list[ParameterUse]]:
    """Return where the points lie at every use, from the gradients that tell it, and the uses without such an axis."""
    n = len(z)
    of_first, of_others = _random_like(z, seed=0).repeat(2, 1, 1)
    of_first[1:], of_others[0] = 0, 0
    found = gradients_at(z, [use.call for use in uses], torch.stack([of_first, of_others]))
    places: dict[tuple[int, int], BatchAxis] = {}
    without = []
    seen: Counter[int] = Counter()
    for use in uses:
        number, call = use.subset.number, id(use.call)
        possible = possible_axes(use.call.shape, use.call.axes, n)
        if call in found:
            possible = [c for c in possible if separates(c, n, *found[call])]
        if possible:
            places[number, seen[number]] = possible[0]
        else:
            without.append(use)
        seen[number] += 1
    return places, without


def unproven(tape: Tape, params: Sequence[Tensor], without: Collection[int] = ()) -> tuple[set[int], bool]:
    """Return the numbers of the parameters whose blocks do not give the Jacobian of every point.

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
    calls = {id(call): call for block in tape.blocks for call in block.calls}
    coarsest = coarsest_dtype(calls.values(), z.dtype)
    v = _random_like(z, seed=n)
    inputs: Any = [*(call.edge for call in calls.values()), *(params[k] for k in tracked)]
    found = torch.autograd.grad(z, inputs, v, retain_graph=True, allow_unused=True)
    one: Gradients = {key: g.to(z.dtype).unsqueeze(0) for key, g in zip(calls, found, strict=False) if g is not None}
    wanted = {
        k: torch.zeros_like(params[k]) if g is None else g for k, g in zip(tracked, found[len(calls) :], strict=True)
    }
    del found
    # Those of nn.Embedding(sparse=True) are sparse.
    flat = {k: (g.to_dense() if g.is_sparse else g).to(z.dtype).flatten() for k, g in wanted.items()}
    if not all(_read(g.isfinite().all() for g in flat.values())):
        return set(), False
    telling = all(_read(g.any() for g in one.values()))
    terms: dict[int, list[tuple[BlockJacobian, Tensor]]] = {k: [] for k in tracked}
    for block, b in tape.reached(one):
        terms[block.number].append((block.jacobian, b))
    right = _read(_agree(_total(terms[k], g), g, g, coarsest) for k, g in flat.items())
    apart = [k for k, agrees in zip(flat, right, strict=True) if not agrees]
    # A gradient that is a cancellation has the rounding error of its terms.
    sizes = {k: _total(terms[k], flat[k], absolute=True) for k in apart}
    right = _read(_agree(_total(terms[k], flat[k]), flat[k], sizes[k], coarsest) for k in apart)
    wrong = {k for k, agrees in zip(apart, right, strict=True) if not agrees}
    if n > 1 and calls:
        levels = _LEVELS if torch.finfo(coarsest).bits > 16 else _LEVELS_OF_HALF
        order = torch.randperm(-(-n // levels) * levels, generator=torch.Generator().manual_seed(n))[:n]
        multiples = torch.exp2(-(order % levels).double()).to(z)
        other = tape.gradients((v * multiples.unsqueeze(1)).unsqueeze(0))
        uses = {
            (id(use.call), use.batch_axis): use for block in tape.blocks for use in block.uses if id(use.call) in one
        }
        scaled = _read(_scales(one[key][0], other[key][0], use, multiples) for (key, _), use in uses.items())
        mixed = {key for key, scales in zip(uses, scaled, strict=True) if not scales}
        wrong |= {p.number for p in tape.blocks if any((id(use.call), use.batch_axis) in mixed for use in p.uses)}
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
    uses = [use for block in tape.blocks for use in block.uses]
    found += [(use.subset.number, use.kind, use.shape, use.batch_axis, order.get(use.call.edge.node)) for use in uses]
    return hash((len(tape.z), *found))


@cache
def _option_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_saved_")]


def _read(checks: Iterable[Tensor]) -> list[bool]:
    """Read tensors of one boolean, such that a device is waited for once."""
    several = list(checks)
    return torch.stack([check.to(several[0].device) for check in several]).tolist() if several else []


def _total(terms: Sequence[tuple[BlockJacobian, Tensor]], like: Tensor, absolute: bool = False) -> Tensor:
    """Return the sum of the blocks of a parameter (size,), or of their absolute terms."""
    out = torch.zeros_like(like)
    for jacobian, b in terms:
        out[jacobian.place] += jacobian.total(b, absolute)
    return out


def _scales(one: Tensor, other: Tensor, use: ParameterUse, multiples: Tensor) -> Tensor:
    """Return whether the rows of every point in ``other`` are its multiple of those in ``one``."""
    a, b = (by_point(t, use.batch_axis, len(multiples)).flatten(1) for t in (one, other))
    if not a.numel():
        return torch.ones((), dtype=torch.bool, device=a.device)
    expected = a * multiples.unsqueeze(1)
    size = expected.abs().amax(1)
    # Rows whose numbers lose digits near the smallest one say nothing.
    kind = torch.finfo(use.call.dtype)
    ignored = kind.tiny * (16 if kind.bits == 16 else 1 / kind.eps)
    return ((b - expected).abs().amax(1) <= _TOLERANCE * size + ignored).all()


def _agree(found: Tensor, wanted: Tensor, size: Tensor, dtype: torch.dtype) -> Tensor:
    """Return whether two tensors are equal up to rounding, relative to the largest entry of ``size``."""
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2)
    if wanted.is_cuda and dtype == torch.float32:
        # Convolutions and products may be rounded to the ten bits of TF32.
        tolerance = 1e-2
    if torch.is_autocast_enabled(wanted.device.type):
        tolerance = max(tolerance, 5e-2)
    return (found - wanted).abs().amax() <= tolerance * size.abs().amax()


def coarsest_dtype(calls: Iterable[Call], dtype: torch.dtype) -> torch.dtype:
    """Return the type of the outputs, or of a layer that autocast computes in fewer digits."""
    return max((dtype, *(call.dtype for call in calls)), key=lambda kind: torch.finfo(kind).eps)


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
