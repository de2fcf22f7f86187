"""A batch that has run through an encoder, with the parts of its parameters and the gradients that arrive at them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from contrastive_curvature.network.layer_parts import EmbeddingPart, EntryPart, MatrixPart, Part
from contrastive_curvature.network.recorder import Layout, Run, Use, by_point, fits

Gradients = dict[int, list[Tensor]]
"""By the ``id`` of a run: the gradient at its output for each of K cotangents. A run that none reaches is left out."""

Stacks = dict[tuple[int, Layout], Tensor]
"""By run and layout: the gradients of K cotangents, shape (K, n, ...)."""


class NotVerifiedError(Exception):
    """Uses of some parameters have no rule, are other ones than those of the first batch, or disagree with autograd.

    Args:
        numbers: Of those parameters.
    """

    def __init__(self, numbers: set[int]) -> None:
        super().__init__(f"parameters {sorted(numbers)}")
        self.numbers = numbers


@dataclass
class Piece:
    """A part of a parameter, and the uses that it sums over.

    Args:
        number: Which parameter.
        part: The part.
        uses: Its uses.
    """

    number: int
    part: Part
    uses: list[Use]

    @property
    def runs(self) -> list[Run]:
        """The runs whose gradients it needs."""
        return [use.run for use in self.uses]

    def gradients(self, found: Gradients, n: int, dtype: torch.dtype, stacks: Stacks | None = None) -> Tensor | None:
        """Return gradients of K cotangents as the part takes them; ``None`` where none reaches it.

        Args:
            found: At the runs.
            n: Number of points.
            dtype: Of the outputs.
            stacks: Those of other pieces, which share runs; filled.
        """
        stacks = {} if stacks is None else stacks
        present = [found.get(id(use.run)) for use in self.uses]
        if all(p is None for p in present):
            return None
        one = next(p for p in present if p is not None)
        made = []
        for use, columns in zip(self.uses, present, strict=True):
            if columns is None:
                columns = [one[0].new_zeros(()).expand(use.run.shape)] * len(one)
            key = (id(use.run), use.layout)
            if key not in stacks:
                views = [by_point(column.to(dtype), use.layout, n) for column in columns]
                stacks[key] = views[0].unsqueeze(0) if len(one) == 1 else torch.stack(views)
            made.append(_ordered(use, stacks[key]))
        return made[0] if len(made) == 1 else torch.cat(made, dim=made[0].ndim - 2)


class Tape:
    """Raw outputs of n points with their graph, and the pieces of the parameters.

    Args:
        z: Shape (n, D).
        pieces: Of the parameters that the network uses in ways with a rule.
    """

    def __init__(self, z: Tensor, pieces: list[Piece]) -> None:
        self.z, self.pieces = z, pieces

    def gradients(self, columns: Iterable[Tensor], pieces: Sequence[Piece] | None = None) -> Gradients:
        """Return gradients of cotangents (n, D) at the runs of some pieces, or of all."""
        return gradients_at(
            self.z, [run for p in (self.pieces if pieces is None else pieces) for run in p.runs], columns
        )

    def by_piece(self, columns: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Yield pieces with the gradients of columns (K, n, D), without those that none reaches."""
        found = self.gradients(columns)
        stacks: Stacks = {}
        for piece in self.pieces:
            if stacks and not stacks.keys() & {(id(use.run), use.layout) for use in piece.uses}:
                # Neighbours share runs, as a weight and its bias.
                stacks.clear()
            b = piece.gradients(found, len(self.z), self.z.dtype, stacks)
            if b is not None:
                yield piece, b


def gradients_at(z: Tensor, runs: Iterable[Run], columns: Iterable[Tensor]) -> Gradients:
    """Return gradients of cotangents (n, D) of the outputs at some runs."""
    distinct = {id(run): run for run in runs}
    out: Gradients = {}
    if not z.requires_grad or not distinct:
        return out
    edges = [run.edge for run in distinct.values()]
    for column in columns:
        found = torch.autograd.grad(z, edges, column, retain_graph=True, allow_unused=True)
        for key, gradient in zip(distinct, found, strict=True):
            if gradient is not None:
                out.setdefault(key, []).append(gradient)
    return out


def make_pieces(
    uses: Iterable[Use], places: Mapping[tuple[int, int], Layout], z: Tensor, lacking: set[int]
) -> list[Piece]:
    """Sort the uses of a batch by parameter and entries, and prepare what their gradients need.

    Args:
        uses: Of n points.
        places: Where the points lie at each use: by number of the parameter and of its use.
        z: The outputs (n, D).
        lacking: Numbers of parameters that are left out.

    Raises:
        NotVerifiedError: A use is not in ``places``, has another shape, was overwritten, or the uses of a parameter do
            not add up to pieces.
    """
    n, wrong = len(z), set[int]()
    seen: Counter[int] = Counter()
    groups: list[list[Use]] = []
    for use in uses:
        number = use.selection.number
        if number in lacking:
            continue
        layout = places.get((number, seen[number]))
        seen[number] += 1
        if layout is None or layout.axis not in use.run.axes or not fits(use.run.shape, layout, n) or not use.intact():
            wrong.add(number)
            continue
        use.layout = layout
        mine = next((group for group in groups if _alike(group[0], use)), None)
        if mine is None:
            groups.append([use])
        else:
            mine.append(use)
    pieces: list[Piece] = []
    parts: dict[int, list[Part]] = {}
    for group in groups:
        number = group[0].selection.number
        part = None if number in wrong else _make_part(group, n, z.dtype)
        if part is None:
            wrong.add(number)
        else:
            pieces.append(Piece(number, part, group))
            parts.setdefault(number, []).append(part)
    # Squares of sums over several parts are no sums of squares.
    wrong |= {number for number, several in parts.items() if len(several) > 1 and not _disjoint(several)}
    if wrong:
        raise NotVerifiedError(wrong)
    return pieces


def _alike(a: Use, b: Use) -> bool:
    """Return whether two uses are of the same entries in the same way, so that their positions fit into one row."""
    if a.selection.number != b.selection.number or _family(a) != _family(b) or _own_shape(a) != _own_shape(b):
        return False
    if a.options.get("groups", 1) != b.options.get("groups", 1):
        return False
    one, other = a.selection.entries, b.selection.entries
    if one is None or other is None:
        return one is other
    return torch.equal(one.flatten(), other.flatten())


def _family(use: Use) -> str:
    return "matrix" if use.kind in ("linear", "convolution") else use.kind


def _own_shape(use: Use) -> tuple[int, ...]:
    """Return the shape of the entries, without axes that were only aligned with an output."""
    start = next((j for j, size in enumerate(use.shape) if size > 1), len(use.shape)) if use.kind == "entrywise" else 0
    return tuple(use.shape[start:])


def _disjoint(parts: list[Part]) -> bool:
    if any(part.entries is None for part in parts):
        return False
    together = torch.cat([part.entries for part in parts if part.entries is not None])
    return together.unique().numel() == together.numel()


def _make_part(group: list[Use], n: int, dtype: torch.dtype) -> Part | None:
    """Prepare uses of the same entries in the same way; ``None`` where a matrix has an entry twice."""
    first, entries = group[0], group[0].selection.entries
    flat = None if entries is None else entries.flatten().to(first.run.device)
    if first.kind == "entrywise":
        factors = _factors(group, n, dtype)
        if flat is None:
            return EntryPart(factors, first.shape.numel())
        chosen, places = flat.unique(return_inverse=True)
        if len(chosen) == len(flat):
            return EntryPart(factors, len(flat), None, flat)
        return EntryPart(factors, len(chosen), places, chosen)
    if flat is not None and len(flat.unique()) < len(flat):
        return None
    if first.kind == "embedding":
        tokens = torch.cat([_tokens(use, n) for use in group], dim=1)
        return EmbeddingPart(tokens, (first.shape[0], first.shape[1]), flat)
    inputs = [_inputs(use, n, dtype) for use in group]
    channels = first.shape[0] // inputs[0].shape[1]
    return MatrixPart(inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=2), channels, flat)


def _ordered(use: Use, b: Tensor) -> Tensor:
    """Return gradients (K, n, m, *rest) as the part takes them."""
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


def _entries_last(use: Use, t: Tensor, start: int) -> Tensor:
    """Reshape (..., m, *rest) to (..., positions, entries); the axes of the output begin at ``start``."""
    aligned = list(use.shape)
    del aligned[use.layout.axis]
    kept = [start + j for j, size in enumerate(aligned) if size != 1]
    summed = [j for j in range(start - 1, t.ndim) if j not in kept]
    count = math.prod(t.shape[j] for j in kept)
    return t.permute(*range(start - 1), *summed, *kept).reshape(*t.shape[: start - 1], -1, count)


def _factors(group: list[Use], n: int, dtype: torch.dtype) -> Tensor | None:
    if all(use.source is None for use in group):
        return None
    made = []
    for use in group:
        source = torch.ones((), dtype=dtype, device=use.run.device) if use.source is None else use.source.to(dtype)
        made.append(_entries_last(use, by_point(source.expand(use.run.shape), use.layout, n), 2))
    return made[0] if len(made) == 1 else torch.cat(made, dim=1)


def _tokens(use: Use, n: int) -> Tensor:
    """Return tokens (n, T), -1 for the padding index, whose row has no gradient."""
    tokens = by_point(use.source, use.layout, n).reshape(n, -1)
    padding = use.options.get("padding_idx")
    if padding is None:
        return tokens
    padding = padding + use.shape[0] if padding < 0 else padding
    return tokens.masked_fill(tokens == padding, -1)


def _inputs(use: Use, n: int, dtype: torch.dtype) -> Tensor:
    """Return the inputs of a matrix, shape (n, groups, positions, inputs of a group)."""
    a = use.source.to(dtype)
    if use.kind == "linear":
        return by_point(a, use.layout, n).reshape(n, 1, -1, a.shape[-1])
    windows = by_point(_windows(a, use), use.layout, n)
    split = windows.unflatten(2, (use.options.get("groups", 1), -1)).permute(0, 2, 1, 4, 3)
    return split[:, :, 0] if split.shape[2] == 1 else split.flatten(2, 3)


def _windows(a: Tensor, use: Use) -> Tensor:
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
