"""A batch's run through an encoder, with the blocks of the parameters and the gradients at these blocks.

A run of a few points finds the axes of the layers' outputs that hold the points (:func:`analyse_layers`). Two backward
passes of a batch check the rest (:func:`unproven`). First, for a random cotangent ``v``, the sum over points
``J_i^T v_i`` equals autograd's; both sides are linear in ``v``, so they are equal for every cotangent. Second, if each
point's cotangent is multiplied by a number of its own, so are its gradients at the layers: every row depends on its
point alone. Together, every ``J_i`` is right, up to rounding, with probability one. A run of functions that keep each
point in its place is right by construction (:meth:`.Recorder.proves`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.layer_parts import Gradients, MatrixBlock, ParameterBlock, make_block
from contrastive_curvature.network.pullback import random_like, rounding
from contrastive_curvature.network.recorder import BatchAxis, Call, ParameterUse, Recorder, by_point, possible_axes

_LEVELS = 16
"""Different multiples, powers of two, so that no rounding changes: from 1 to 2^-15. Up to 16 points all differ."""

_LEVELS_OF_HALF = 8
"""In half precision, whose smallest numbers are near."""

_TOLERANCE = 0.1
"""Of a row, relative to its largest entry; two different multiples differ by half or more."""


@dataclass
class Tape:
    """Raw outputs of n points with their graph, and the blocks of the parameters.

    Args:
        z: Shape (n, D).
        blocks: Blocks of the parameters that have a rule for every use.
    """

    z: Tensor
    blocks: list[ParameterBlock]

    @property
    def axes(self) -> Tensor:
        """Return the unit cotangents of every output, shape (D, n, D)."""
        eye = torch.eye(self.z.shape[1], dtype=self.z.dtype, device=self.z.device)
        return eye.unsqueeze(1).expand(-1, len(self.z), -1)

    def gradients(self, columns: Tensor, blocks: Sequence[ParameterBlock] | None = None) -> Gradients:
        """Return gradients for cotangents (K, n, D) at the calls of some blocks, by default all."""
        return gradients_at(self.z, calls_of(self.blocks if blocks is None else blocks), columns)

    def reached(self, at_calls: Gradients) -> Iterator[tuple[ParameterBlock, Tensor]]:
        """Yield the blocks that gradients reach, with the gradients at their calls."""
        for block in self.blocks:
            b = block.gradients(at_calls)
            if b is not None:
                yield block, b


def calls_of(blocks: Iterable[ParameterBlock]) -> list[Call]:
    """Return the distinct calls whose gradients some blocks need, in order."""
    return list(dict.fromkeys(use.call for block in blocks for use in block.uses))


def gradients_at(z: Tensor, calls: Sequence[Call], columns: Tensor) -> Gradients:
    """Return gradients for cotangents (K, n, D) at some distinct calls, in the dtype of the outputs."""
    if not z.requires_grad or not calls:
        return {}
    edges = [call.edge for call in calls]
    by_call: dict[Call, list[Tensor]] = defaultdict(list)
    for column in columns:
        gradients = torch.autograd.grad(z, edges, column, retain_graph=True, allow_unused=True)
        for call, gradient in zip(calls, gradients, strict=True):
            if gradient is not None:
                by_call[call].append(gradient.to(z.dtype))
    out: Gradients = {}
    for call in list(by_call):
        # Only one call at a time is in memory twice.
        several = by_call.pop(call)
        out[call] = several[0].unsqueeze(0) if len(several) == 1 else torch.stack(several)
    return out


@dataclass(frozen=True)
class LayerAnalysis:
    """Results of a run of a few points through an encoder; empty by default.

    Args:
        places: Where the points lie at each use: by number of the parameter and of its use.
        lookups: Numbers of the embeddings whose tokens do not depend on the points.
        matrices: Numbers of the parameters that are one matrix for the inputs of every position, without groups.
        used: Numbers of the parameters that a function uses.
        gradients: Number of entries in one point's gradients at the outputs of all layers.
        inputs: Number of entries in one point's inputs of matrices.
        lacking: Numbers of the parameters with a use that has no rule.
    """

    places: Mapping[tuple[int, int], BatchAxis] = field(default_factory=dict)
    lookups: frozenset[int] = frozenset()
    matrices: frozenset[int] = frozenset()
    used: frozenset[int] = frozenset()
    gradients: int = 1
    inputs: int = 0
    lacking: frozenset[int] = frozenset()


def analyse_layers(encoder: Encoder, params: Sequence[Tensor], few: Inputs) -> LayerAnalysis:
    """Run a few points, and find where the gradients of one point arrive.

    Args:
        encoder: The analysed encoder, in evaluation mode; gradients are enabled.
        params: Trainable parameters of the encoder.
        few: Inputs from :func:`.few_points`.
    """
    lookups = frozenset[int]()
    while True:
        with Recorder(list(params), lookups) as recorder:
            z = encoder(few)
        proven = recorder.proves(z)
        places, without = _batch_axes(recorder.uses, z, proven)
        tables = {use.subset.number for use in without if use.kind == "embedding"} - lookups
        if not tables:
            break
        lookups |= tables
    lacking = recorder.unknown | {use.subset.number for use in without}
    if not proven:
        again = encoder(few).detach()
        if not bool(_agree(z.detach(), again, again, coarsest_dtype([use.call for use in recorder.uses], z.dtype))):
            # The encoder is random: its outputs change with every run.
            lacking = set(range(len(params)))
    blocks, wrong = make_blocks(recorder.uses, places, z, lacking)
    lacking |= wrong
    counts = Counter(block.number for block in blocks)
    matrices = [block for block in blocks if isinstance(block, MatrixBlock)]
    return LayerAnalysis(
        places,
        lookups,
        frozenset(m.number for m in matrices if counts[m.number] == 1 and m.groups == 1 and m.entries is None),
        frozenset(use.subset.number for use in recorder.uses) | lacking,
        max(1, sum(call.shape.numel() for call in calls_of(blocks)) // len(z)),
        sum(m.inputs.numel() for m in matrices) // len(z),
        frozenset(lacking),
    )


def _batch_axes(
    uses: Sequence[ParameterUse], z: Tensor, proven: bool
) -> tuple[dict[tuple[int, int], BatchAxis], list[ParameterUse]]:
    """Return the axis of the points at every use, and the uses without one; found by gradients unless ``proven``.

    Args:
        uses: Uses by n points.
        z: The outputs (n, D).
        proven: Whether the layers keep the points in front (:meth:`.Recorder.proves`).
    """
    n = len(z)
    of_first, of_others = random_like(z, seed=0).repeat(2, 1, 1)
    of_first[1:], of_others[0] = 0, 0
    calls = [] if proven else list(dict.fromkeys(use.call for use in uses))
    at_calls = gradients_at(z, calls, torch.stack([of_first, of_others]))

    def separates(batch_axis: BatchAxis, gradients: Tensor) -> bool:
        first, others = (by_point(g, batch_axis, n) for g in gradients)
        return not bool(first[1:].any()) and not bool(others[0].any())

    places: dict[tuple[int, int], BatchAxis] = {}
    without = []
    for use in uses:
        possible = possible_axes(use.call.shape, use.axes, n)
        if use.call in at_calls:
            possible = [place for place in possible if separates(place, at_calls[use.call])]
        if possible:
            places[use.key] = possible[0]
        else:
            without.append(use)
    return places, without


def unproven(tape: Tape, params: Sequence[Tensor], without: Collection[int] = ()) -> set[int]:
    """Return the numbers of the parameters with blocks that do not yield the Jacobian of every point.

    The set is empty if gradients overflow: such a curvature is refused later.

    Args:
        tape: A run of n points; gradients are enabled.
        params: The trainable parameters.
        without: Numbers of the parameters that are computed in another way.
    """
    tracked = [k for k, p in enumerate(params) if k not in without and p.numel()]
    z, n = tape.z, len(tape.z)
    if not z.requires_grad or not tracked or not n:
        return set()
    calls = calls_of(tape.blocks)
    coarsest = coarsest_dtype(calls, z.dtype)
    v = random_like(z, seed=n)
    inputs: Any = [*(call.edge for call in calls), *(params[k] for k in tracked)]
    gradients = torch.autograd.grad(z, inputs, v, retain_graph=True, allow_unused=True)
    one = {call: g.to(z.dtype).unsqueeze(0) for call, g in zip(calls, gradients, strict=False) if g is not None}
    truth = {
        # Gradients of nn.Embedding(sparse=True) are sparse.
        k: (torch.zeros_like(params[k]) if g is None else g.to_dense() if g.is_sparse else g).to(z.dtype).flatten()
        for k, g in zip(tracked, gradients[len(calls) :], strict=True)
    }
    if not all(_read(g.isfinite().all() for g in truth.values())):
        return set()
    terms: dict[int, list[tuple[ParameterBlock, Tensor]]] = {k: [] for k in tracked}
    for block, b in tape.reached(one):
        terms[block.number].append((block, b))
    right = _read(_agree(_total(terms[k], g), g, g, coarsest) for k, g in truth.items())
    apart = [k for k, agrees in zip(truth, right, strict=True) if not agrees]
    # A gradient whose terms cancel has the rounding error of its terms.
    sizes = {k: _total(terms[k], truth[k], absolute=True) for k in apart}
    right = _read(_agree(_total(terms[k], truth[k]), truth[k], sizes[k], coarsest) for k in apart)
    wrong = {k for k, agrees in zip(apart, right, strict=True) if not agrees}
    if n > 1 and calls:
        levels = _LEVELS if torch.finfo(coarsest).bits > 16 else _LEVELS_OF_HALF
        order = torch.randperm(-(-n // levels) * levels, generator=torch.Generator().manual_seed(n), device="cpu")[:n]
        multiples = torch.exp2(-(order % levels).double()).to(z)
        other = tape.gradients((v * multiples.unsqueeze(1)).unsqueeze(0))
        uses = {(use.call, use.batch_axis): use for b in tape.blocks for use in b.uses if use.call in one}
        scaled = _read(_scales(one[call][0], other[call][0], use, multiples) for (call, _), use in uses.items())
        mixed = {key for key, scales in zip(uses, scaled, strict=True) if not scales}
        wrong |= {b.number for b in tape.blocks if any((use.call, use.batch_axis) in mixed for use in b.uses)}
    return wrong


def _read(checks: Iterable[Tensor]) -> list[bool]:
    """Read tensors of one boolean with a single device synchronisation."""
    several = list(checks)
    return torch.stack([check.to(several[0].device) for check in several]).tolist() if several else []


def _total(terms: Sequence[tuple[ParameterBlock, Tensor]], like: Tensor, absolute: bool = False) -> Tensor:
    """Return the sum of the blocks of a parameter (size,), or of their absolute terms."""
    out = torch.zeros_like(like)
    for block, b in terms:
        out[block.place] += block.total(b, absolute)
    return out


def _scales(one: Tensor, other: Tensor, use: ParameterUse, multiples: Tensor) -> Tensor:
    """Return whether every point's rows in ``other`` are its multiple of its rows in ``one``."""
    a, b = (by_point(t, use.batch_axis, len(multiples)).flatten(1) for t in (one, other))
    if not a.numel():
        return torch.ones((), dtype=torch.bool, device=a.device)
    expected = a * multiples.unsqueeze(1)
    size = expected.abs().amax(1)
    # Rows of numbers near the smallest representable number have lost digits and are ignored.
    kind = torch.finfo(use.call.dtype)
    ignored = kind.tiny * (16 if kind.bits == 16 else 1 / kind.eps)
    return ((b - expected).abs().amax(1) <= _TOLERANCE * size + ignored).all()


def _agree(computed: Tensor, truth: Tensor, size: Tensor, dtype: torch.dtype) -> Tensor:
    """Return whether two tensors are equal up to rounding, relative to the largest entry of ``size``."""
    return (computed - truth).abs().amax() <= rounding(dtype, truth.device) * size.abs().amax()


def coarsest_dtype(calls: Iterable[Call], dtype: torch.dtype) -> torch.dtype:
    """Return the least precise dtype among the outputs and the calls: autocast may compute a layer in fewer digits."""
    return max((dtype, *(call.dtype for call in calls)), key=lambda kind: torch.finfo(kind).eps)


def make_blocks(
    uses: Iterable[ParameterUse], places: Mapping[tuple[int, int], BatchAxis], z: Tensor, lacking: Collection[int]
) -> tuple[list[ParameterBlock], set[int]]:
    """Group the uses of a batch by parameter and entries, and make the Jacobian of each group.

    Args:
        uses: Uses by n points.
        places: Where the points lie at each use: by number of the parameter and of its use.
        z: The outputs (n, D).
        lacking: Numbers of the parameters that are left out.

    Returns:
        The blocks; and the numbers of parameters without blocks, because a use is not in ``places`` or has another
        shape, or because their uses do not form blocks.
    """
    wrong = set[int]()
    groups: dict[tuple[Any, ...], list[list[ParameterUse]]] = {}
    for use in uses:
        if use.subset.number in lacking:
            continue
        batch_axis = places.get(use.key)
        if batch_axis is None or batch_axis.axis not in use.axes or use.call.shape[batch_axis.axis] % len(z):
            wrong.add(use.subset.number)
            continue
        use.batch_axis = batch_axis
        alike = groups.setdefault(_way(use), [])
        group = next((group for group in alike if _same_entries(group[0], use)), None)
        if group is None:
            alike.append([use])
        else:
            group.append(use)
    blocks: dict[int, list[ParameterBlock]] = defaultdict(list)
    for group in chain.from_iterable(groups.values()):
        number = group[0].subset.number
        block = None if number in wrong else make_block(group, len(z), z.dtype)
        if block is None:
            wrong.add(number)
        else:
            blocks[number].append(block)
    # If blocks share an entry, its square is not the sum of the blocks' squares.
    wrong |= {number for number, several in blocks.items() if _overlap(several)}
    return [block for number, several in blocks.items() if number not in wrong for block in several], wrong


def _way(use: ParameterUse) -> tuple[Any, ...]:
    """Return the parameter, the rule and the shape of the entries, without leading axes of length one.

    Uses of the same entries in the same way can join their positions in one axis.
    """
    kind = "matrix" if use.kind in ("linear", "convolution") else use.kind
    aligned = takewhile(lambda size: size == 1, use.shape) if use.kind == "entrywise" else ()
    return use.subset.number, kind, use.shape[len(list(aligned)) :], use.options.get("groups", 1)


def _same_entries(a: ParameterUse, b: ParameterUse) -> bool:
    one, other = a.subset.entries, b.subset.entries
    if one is None or other is None:
        return one is other
    return torch.equal(one.flatten(), other.flatten())


def _overlap(blocks: Sequence[ParameterBlock]) -> bool:
    """Return whether several blocks of one parameter share an entry."""
    if len(blocks) < 2:
        return False
    entries = [block.entries for block in blocks if block.entries is not None]
    return len(entries) < len(blocks) or torch.cat(entries).unique().numel() < sum(map(len, entries))
