"""A batch that has run through an encoder, with the blocks of its parameters and the gradients that arrive at them.

A few points tell where the points lie along the axes of what the layers put out (:func:`analyse_layers`). Two backward
passes of a batch prove the rest (:func:`unproven`). For a random cotangent ``v``, the sum over points ``J_i^T v_i`` is
that of autograd: both sides are linear in ``v``, so that they are equal for every cotangent. And where a cotangent is a
multiple, another one for every point, the gradients at the layers are these multiples: every row is that of its point
alone. Together, every ``J_i`` is right, up to rounding, with probability one. An encoder of torch's own layers in a row
is right as it is built (:func:`is_plain`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contrastive_curvature.hessian.sphere import L2Norm
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.layer_parts import (
    BlockJacobian,
    EmbeddingJacobian,
    EntrywiseJacobian,
    MatrixJacobian,
)
from contrastive_curvature.network.recorder import BatchAxis, Call, ParameterUse, Recorder, by_point, possible_axes
from contrastive_curvature.network.threads import users_hooks

_LEVELS = 16
"""Different multiples, powers of two, so that no rounding changes: from 1 to 2^-15. Up to 16 points all differ."""

_LEVELS_OF_HALF = 8
"""In half precision, whose smallest numbers are near."""

_TOLERANCE = 0.1
"""Of a row, relative to its largest entry; two different multiples differ by half or more."""

_PLAIN = frozenset(
    (
        *(nn.Sequential, nn.Linear, nn.Conv1d, nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.Identity),
        *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Dropout, L2Norm),
        *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    )
)
"""Modules that keep every point in its place, in front, and apply their parameters by functions that have a rule."""

Gradients = dict[Call, Tensor]
"""The gradients at the outputs of calls for K cotangents, shape (K, *output), without those that none reaches."""


@dataclass
class ParameterBlock:
    """Some or all entries of a parameter, and the uses that they have in common.

    Args:
        number: Which parameter.
        jacobian: The Jacobian with respect to these entries.
        uses: Its uses.
    """

    number: int
    jacobian: BlockJacobian
    uses: list[ParameterUse]

    @property
    def calls(self) -> list[Call]:
        """The calls whose gradients it needs."""
        return [use.call for use in self.uses]

    def gradients(self, at_calls: Gradients, n: int) -> Tensor | None:
        """Return gradients of K cotangents of n points as its Jacobian takes them; ``None`` where none arrives."""
        reached = [at_calls[call] for call in self.calls if call in at_calls]
        if not reached:
            return None
        by_use = []
        for use in self.uses:
            nothing = reached[0].new_zeros(()).expand(len(reached[0]), *use.call.shape)
            shifted = use.batch_axis._replace(axis=use.batch_axis.axis + 1)
            by_use.append(_ordered(use, by_point(at_calls.get(use.call, nothing), shifted, n).movedim(2, 0)))
        return by_use[0] if len(by_use) == 1 else torch.cat(by_use, dim=-2)


@dataclass
class Tape:
    """Raw outputs of n points with their graph, and the blocks of the parameters.

    Args:
        z: Shape (n, D).
        blocks: Of the parameters that the network uses in ways with a rule.
    """

    z: Tensor
    blocks: list[ParameterBlock]

    @property
    def axes(self) -> Tensor:
        """The cotangents of every output alone, shape (D, n, D)."""
        eye = torch.eye(self.z.shape[1], dtype=self.z.dtype, device=self.z.device)
        return eye.unsqueeze(1).expand(-1, len(self.z), -1)

    def gradients(self, columns: Tensor, blocks: Sequence[ParameterBlock] | None = None) -> Gradients:
        """Return gradients of cotangents (K, n, D) at the calls of some blocks, or of all."""
        calls = [call for block in (self.blocks if blocks is None else blocks) for call in block.calls]
        return gradients_at(self.z, calls, columns)

    def reached(self, at_calls: Gradients) -> Iterator[tuple[ParameterBlock, Tensor]]:
        """Yield blocks with the gradients at their calls, without those that none reaches."""
        for block in self.blocks:
            b = block.gradients(at_calls, len(self.z))
            if b is not None:
                yield block, b


def gradients_at(z: Tensor, calls: Iterable[Call], columns: Tensor) -> Gradients:
    """Return gradients of cotangents (K, n, D) of the outputs at some calls, in the type of the outputs."""
    distinct = list(dict.fromkeys(calls))
    if not z.requires_grad or not distinct:
        return {}
    by_call: dict[Call, list[Tensor]] = defaultdict(list)
    for column in columns:
        edges = [call.edge for call in distinct]
        gradients = torch.autograd.grad(z, edges, column, retain_graph=True, allow_unused=True)
        for call, gradient in zip(distinct, gradients, strict=True):
            if gradient is not None:
                by_call[call].append(gradient.to(z.dtype))
    out: Gradients = {}
    for call in list(by_call):
        # One call at a time is held twice.
        several = by_call.pop(call)
        out[call] = several[0].unsqueeze(0) if len(several) == 1 else torch.stack(several)
    return out


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


def is_plain(encoder: Encoder) -> bool:
    """Return whether an encoder is torch's own layers in a row, each of which keeps every point in its place."""
    return all(
        (type(module) in _PLAIN or (type(module) is nn.Flatten and module.start_dim > 0))
        and "forward" not in vars(module)
        and not (users_hooks(module) or module._backward_hooks or module._backward_pre_hooks)
        for module in encoder.model.modules()
    )


def analyse_layers(encoder: Encoder, params: Sequence[Tensor], few: Inputs) -> LayerAnalysis:
    """Run a few points, and see where the gradients of one of them arrive.

    Args:
        encoder: The analysed encoder, in evaluation mode; gradients are enabled.
        params: Its trainable parameters.
        few: From :func:`.few_points`.
    """
    lookups, plain = frozenset[int](), is_plain(encoder)
    while True:
        with Recorder(list(params), lookups) as recorder:
            z = encoder(few)
        places, without = _batch_axes(recorder.uses, z, plain)
        tables = {use.subset.number for use in without if use.kind == "embedding"} - lookups
        if not tables:
            break
        lookups |= tables
    lacking = recorder.unknown | {use.subset.number for use in without}
    if not plain:
        again = encoder(few).detach()
        if not bool(_agree(z.detach(), again, again, coarsest_dtype([use.call for use in recorder.uses], z.dtype))):
            # Every run of the encoder gives other outputs.
            lacking = set(range(len(params)))
    blocks, wrong = make_blocks(recorder.uses, places, z, lacking)
    lacking |= wrong
    counts = Counter(block.number for block in blocks)
    matrices = {block.number: block.jacobian for block in blocks if isinstance(block.jacobian, MatrixJacobian)}
    calls = {call for block in blocks for call in block.calls}
    return LayerAnalysis(
        places,
        lookups,
        frozenset(k for k, m in matrices.items() if counts[k] == 1 and m.groups == 1 and m.entries is None),
        frozenset(use.subset.number for use in recorder.uses) | lacking,
        max(1, sum(call.shape.numel() for call in calls) // len(z)),
        sum(p.jacobian.inputs.numel() for p in blocks if isinstance(p.jacobian, MatrixJacobian)) // len(z),
        frozenset(lacking),
    )


def _batch_axes(
    uses: Sequence[ParameterUse], z: Tensor, plain: bool
) -> tuple[dict[tuple[int, int], BatchAxis], list[ParameterUse]]:
    """Return where the points lie at every use, and the uses without such an axis; gradients tell it but of plain ones.

    Args:
        uses: Of n points.
        z: The outputs (n, D).
        plain: Whether the layers keep the points in front (:func:`is_plain`).
    """
    n = len(z)
    of_first, of_others = _random_like(z, seed=0).repeat(2, 1, 1)
    of_first[1:], of_others[0] = 0, 0
    at_calls = {} if plain else gradients_at(z, [use.call for use in uses], torch.stack([of_first, of_others]))

    def separates(batch_axis: BatchAxis, gradients: Tensor) -> bool:
        first, others = (by_point(g, batch_axis, n) for g in gradients)
        return not bool(first[1:].any()) and not bool(others[0].any())

    places: dict[tuple[int, int], BatchAxis] = {}
    without = []
    seen: Counter[int] = Counter()
    for use in uses:
        number, possible = use.subset.number, possible_axes(use.call.shape, use.axes, n)
        if use.call in at_calls:
            possible = [place for place in possible if separates(place, at_calls[use.call])]
        if possible:
            places[number, seen[number]] = possible[0]
        else:
            without.append(use)
        seen[number] += 1
    return places, without


def unproven(tape: Tape, params: Sequence[Tensor], without: Collection[int] = ()) -> set[int]:
    """Return the numbers of the parameters whose blocks do not give the Jacobian of every point.

    There are none where gradients overflow: such a curvature is refused later.

    Args:
        tape: A run of n points; gradients are enabled.
        params: The trainable parameters.
        without: Numbers of those that are computed in another way.
    """
    tracked = [k for k, p in enumerate(params) if k not in without and p.numel()]
    z, n = tape.z, len(tape.z)
    if not z.requires_grad or not tracked or not n:
        return set()
    calls = list(dict.fromkeys(call for block in tape.blocks for call in block.calls))
    coarsest = coarsest_dtype(calls, z.dtype)
    v = _random_like(z, seed=n)
    inputs: Any = [*(call.edge for call in calls), *(params[k] for k in tracked)]
    gradients = torch.autograd.grad(z, inputs, v, retain_graph=True, allow_unused=True)
    one = {call: g.to(z.dtype).unsqueeze(0) for call, g in zip(calls, gradients, strict=False) if g is not None}
    truth = {
        # Those of nn.Embedding(sparse=True) are sparse.
        k: (torch.zeros_like(params[k]) if g is None else g.to_dense() if g.is_sparse else g).to(z.dtype).flatten()
        for k, g in zip(tracked, gradients[len(calls) :], strict=True)
    }
    if not all(_read(g.isfinite().all() for g in truth.values())):
        return set()
    terms: dict[int, list[tuple[BlockJacobian, Tensor]]] = {k: [] for k in tracked}
    for block, b in tape.reached(one):
        terms[block.number].append((block.jacobian, b))
    right = _read(_agree(_total(terms[k], g), g, g, coarsest) for k, g in truth.items())
    apart = [k for k, agrees in zip(truth, right, strict=True) if not agrees]
    # A gradient that is a cancellation has the rounding error of its terms.
    sizes = {k: _total(terms[k], truth[k], absolute=True) for k in apart}
    right = _read(_agree(_total(terms[k], truth[k]), truth[k], sizes[k], coarsest) for k in apart)
    wrong = {k for k, agrees in zip(apart, right, strict=True) if not agrees}
    if n > 1 and calls:
        levels = _LEVELS if torch.finfo(coarsest).bits > 16 else _LEVELS_OF_HALF
        order = torch.randperm(-(-n // levels) * levels, generator=torch.Generator().manual_seed(n))[:n]
        multiples = torch.exp2(-(order % levels).double()).to(z)
        other = tape.gradients((v * multiples.unsqueeze(1)).unsqueeze(0))
        uses = {(use.call, use.batch_axis): use for b in tape.blocks for use in b.uses if use.call in one}
        scaled = _read(_scales(one[call][0], other[call][0], use, multiples) for (call, _), use in uses.items())
        mixed = {key for key, scales in zip(uses, scaled, strict=True) if not scales}
        wrong |= {b.number for b in tape.blocks if any((use.call, use.batch_axis) in mixed for use in b.uses)}
    return wrong


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


def _agree(computed: Tensor, truth: Tensor, size: Tensor, dtype: torch.dtype) -> Tensor:
    """Return whether two tensors are equal up to rounding, relative to the largest entry of ``size``."""
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2)
    if truth.is_cuda and dtype == torch.float32:
        # Convolutions and products may be rounded to the ten bits of TF32.
        tolerance = 1e-2
    if torch.is_autocast_enabled(truth.device.type):
        tolerance = max(tolerance, 5e-2)
    return (computed - truth).abs().amax() <= tolerance * size.abs().amax()


def coarsest_dtype(calls: Iterable[Call], dtype: torch.dtype) -> torch.dtype:
    """Return the type of the outputs, or of a layer that autocast computes in fewer digits."""
    return max((dtype, *(call.dtype for call in calls)), key=lambda kind: torch.finfo(kind).eps)


def _random_like(z: Tensor, seed: int) -> Tensor:
    return torch.randn(z.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(z)


def make_blocks(
    uses: Iterable[ParameterUse], places: Mapping[tuple[int, int], BatchAxis], z: Tensor, lacking: Collection[int]
) -> tuple[list[ParameterBlock], set[int]]:
    """Sort the uses of a batch by parameter and entries, and prepare what their gradients need.

    Args:
        uses: Of n points.
        places: Where the points lie at each use: by number of the parameter and of its use.
        z: The outputs (n, D).
        lacking: Numbers of parameters that are left out.

    Returns:
        The blocks; and the numbers of parameters without blocks, because a use is not in ``places`` or has another
        shape, or because their uses do not add up to blocks.
    """
    n, wrong = len(z), set[int]()
    seen: Counter[int] = Counter()
    groups: dict[tuple[Any, ...], list[list[ParameterUse]]] = {}
    for use in uses:
        number = use.subset.number
        if number in lacking:
            continue
        batch_axis = places.get((number, seen[number]))
        seen[number] += 1
        if batch_axis is None or batch_axis.axis not in use.axes or use.call.shape[batch_axis.axis] % n:
            wrong.add(number)
            continue
        use.batch_axis = batch_axis
        alike = groups.setdefault(_way(use), [])
        group = next((group for group in alike if _same_entries(group[0], use)), None)
        if group is None:
            alike.append([use])
        else:
            group.append(use)
    blocks: list[ParameterBlock] = []
    jacobians: dict[int, list[BlockJacobian]] = {}
    for group in chain.from_iterable(groups.values()):
        number = group[0].subset.number
        jacobian = None if number in wrong else _make_jacobian(group, n, z.dtype)
        if jacobian is None:
            wrong.add(number)
        else:
            blocks.append(ParameterBlock(number, jacobian, group))
            jacobians.setdefault(number, []).append(jacobian)
    # Squares of sums over several blocks are no sums of squares.
    wrong |= {number for number, several in jacobians.items() if _overlap(several)}
    return [block for block in blocks if block.number not in wrong], wrong


def _way(use: ParameterUse) -> tuple[Any, ...]:
    """Return the parameter, the rule and the shape of the entries, without axes only aligned with an output.

    Positions of uses of the same entries in the same way fit into one row.
    """
    kind = "matrix" if use.kind in ("linear", "convolution") else use.kind
    aligned = takewhile(lambda size: size == 1, use.shape) if use.kind == "entrywise" else ()
    return use.subset.number, kind, use.shape[len(list(aligned)) :], use.options.get("groups", 1)


def _same_entries(a: ParameterUse, b: ParameterUse) -> bool:
    one, other = a.subset.entries, b.subset.entries
    if one is None or other is None:
        return one is other
    return torch.equal(one.flatten(), other.flatten())


def _overlap(jacobians: list[BlockJacobian]) -> bool:
    """Return whether several blocks of one parameter share an entry."""
    if len(jacobians) < 2:
        return False
    entries = [jacobian.entries for jacobian in jacobians if jacobian.entries is not None]
    return len(entries) < len(jacobians) or torch.cat(entries).unique().numel() < sum(map(len, entries))


def _make_jacobian(group: list[ParameterUse], n: int, dtype: torch.dtype) -> BlockJacobian | None:
    """Prepare uses of the same entries in the same way; ``None`` where a matrix has an entry twice."""
    first, entries = group[0], group[0].subset.entries
    flat = None if entries is None else entries.flatten().to(first.call.device)
    if first.kind == "entrywise":
        factors = _factors(group, n, dtype)
        if flat is None:
            return EntrywiseJacobian(factors, first.shape.numel())
        distinct, places = flat.unique(return_inverse=True)
        if len(distinct) == len(flat):
            return EntrywiseJacobian(factors, len(flat), None, flat)
        return EntrywiseJacobian(factors, len(distinct), places, distinct)
    if flat is not None and len(flat.unique()) < len(flat):
        return None
    if first.kind == "embedding":
        tokens = torch.cat([_tokens(use, n) for use in group], dim=1)
        return EmbeddingJacobian(tokens, (first.shape[0], first.shape[1]), flat)
    inputs = [_inputs(use, n, dtype) for use in group]
    channels = first.shape[0] // inputs[0].shape[1]
    return MatrixJacobian(inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=2), channels, flat)


def _ordered(use: ParameterUse, b: Tensor) -> Tensor:
    """Return gradients (K, n, m, *rest) as the Jacobian takes them."""
    many, n, m = b.shape[:3]
    if use.kind == "linear":
        return b.reshape(many, n, 1, -1, b.shape[-1])
    if use.kind == "embedding":
        return b.reshape(many, n, -1, b.shape[-1])
    if use.kind == "convolution":
        groups = use.options.get("groups", 1)
        split = b.flatten(4).unflatten(3, (groups, -1)).permute(0, 1, 3, 2, 5, 4)
        return split[:, :, :, 0] if m == 1 else split.flatten(3, 4)
    return _entries_last(use, b, 3)


def _entries_last(use: ParameterUse, t: Tensor, start: int) -> Tensor:
    """Reshape (..., m, *rest) to (..., positions, entries); the axes of the output begin at ``start``."""
    aligned = list(use.shape)
    del aligned[use.batch_axis.axis]
    kept = [start + j for j, size in enumerate(aligned) if size != 1]
    summed = [j for j in range(start - 1, t.ndim) if j not in kept]
    count = math.prod(t.shape[j] for j in kept)
    return t.permute(*range(start - 1), *summed, *kept).reshape(*t.shape[: start - 1], -1, count)


def _factors(group: list[ParameterUse], n: int, dtype: torch.dtype) -> Tensor | None:
    if all(use.source is None for use in group):
        return None
    factors = []
    for use in group:
        source = torch.ones((), dtype=dtype, device=use.call.device) if use.source is None else use.source.to(dtype)
        factors.append(_entries_last(use, by_point(source.expand(use.call.shape), use.batch_axis, n), 2))
    return factors[0] if len(factors) == 1 else torch.cat(factors, dim=1)


def _tokens(use: ParameterUse, n: int) -> Tensor:
    """Return tokens (n, T), -1 for the padding index, whose row has no gradient."""
    tokens = by_point(use.source, use.batch_axis, n).reshape(n, -1)
    padding = use.options.get("padding_idx")
    if padding is None:
        return tokens
    padding = padding + use.shape[0] if padding < 0 else padding
    return tokens.masked_fill(tokens == padding, -1)


def _inputs(use: ParameterUse, n: int, dtype: torch.dtype) -> Tensor:
    """Return the inputs of a matrix, shape (n, groups, positions, inputs of a group)."""
    a = use.source.to(dtype)
    if use.kind == "linear":
        return by_point(a, use.batch_axis, n).reshape(n, 1, -1, a.shape[-1])
    windows = by_point(_windows(a, use), use.batch_axis, n)
    split = windows.unflatten(2, (use.options.get("groups", 1), -1)).permute(0, 2, 1, 4, 3)
    return split[:, :, 0] if split.shape[2] == 1 else split.flatten(2, 3)


def _windows(a: Tensor, use: ParameterUse) -> Tensor:
    """Return the inputs that a convolution multiplies its weight with, shape (N, inputs, positions)."""
    kernel = tuple(use.shape[2:])
    axes = len(kernel)
    stride, dilation = (_each(use.options.get(name, 1), axes) for name in ("stride", "dilation"))
    padding = use.options.get("padding", 0)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        pads = [(t // 2, t - t // 2) for t in total]
    else:
        pads = [(p, p) for p in _each(0 if padding == "valid" else padding, axes)]
    if any(p for pair in pads for p in pair):
        a = F.pad(a, [p for pair in reversed(pads) for p in pair])
    if kernel == (1,) * axes:
        return a[(slice(None), slice(None), *(slice(None, None, s) for s in stride))].flatten(2)
    if axes == 1:
        a, kernel, stride, dilation = a.unsqueeze(2), (1, *kernel), (1, *stride), (1, *dilation)
    return F.unfold(a, kernel, dilation, 0, stride)


def _each(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * axes
    return tuple(value) * (axes if len(value) == 1 else 1)
