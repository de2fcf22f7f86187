"""A batch that has run through an encoder, with the parts of its parameters and the gradients that arrive at them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from contrastive_curvature.network.layer_parts import EmbeddingPart, EntryPart, MatrixPart, Part
from contrastive_curvature.network.recorder import Layout, Run, Use, by_point, fits

Gradients = dict[int, Tensor]
"""By the ``id`` of a run: the gradients at its output for K cotangents, shape (K, *output). A run that none reaches is
left out."""


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

    def gradients(self, found: Gradients, n: int) -> Tensor | None:
        """Return gradients of K cotangents of n points as the part takes them; ``None`` where none reaches it."""
        reached = [found[id(run)] for run in self.runs if id(run) in found]
        if not reached:
            return None
        made = []
        for use in self.uses:
            nothing = reached[0].new_zeros(()).expand(len(reached[0]), *use.run.shape)
            b = by_point(found.get(id(use.run), nothing), use.layout._replace(axis=use.layout.axis + 1), n)
            made.append(_ordered(use, b.movedim(2, 0)))
        return made[0] if len(made) == 1 else torch.cat(made, dim=-2)


class Tape:
    """Raw outputs of n points with their graph, and the pieces of the parameters.

    Args:
        z: Shape (n, D).
        pieces: Of the parameters that the network uses in ways with a rule.
    """

    def __init__(self, z: Tensor, pieces: list[Piece]) -> None:
        self.z, self.pieces = z, pieces

    @property
    def axes(self) -> Tensor:
        """The cotangents of every output alone, shape (D, n, D)."""
        eye = torch.eye(self.z.shape[1], dtype=self.z.dtype, device=self.z.device)
        return eye.unsqueeze(1).expand(-1, len(self.z), -1)

    def gradients(self, columns: Tensor, pieces: Sequence[Piece] | None = None) -> Gradients:
        """Return gradients of cotangents (K, n, D) at the runs of some pieces, or of all."""
        runs = [run for piece in (self.pieces if pieces is None else pieces) for run in piece.runs]
        return gradients_at(self.z, runs, columns)

    def by_piece(self, columns: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Yield pieces with the gradients of columns (K, n, D), without those that none reaches."""
        return self.reached(self.gradients(columns))

    def reached(self, found: Gradients) -> Iterator[tuple[Piece, Tensor]]:
        """Yield pieces with the gradients at their runs, without those that none reaches."""
        for piece in self.pieces:
            b = piece.gradients(found, len(self.z))
            if b is not None:
                yield piece, b


def gradients_at(z: Tensor, runs: Iterable[Run], columns: Tensor) -> Gradients:
    """Return gradients of cotangents (K, n, D) of the outputs at some runs, in the type of the outputs."""
    distinct = {id(run): run for run in runs}
    if not z.requires_grad or not distinct:
        return {}
    edges = [run.edge for run in distinct.values()]
    by_run: dict[int, list[Tensor]] = {}
    for column in columns:
        found = torch.autograd.grad(z, edges, column, retain_graph=True, allow_unused=True)
        for key, gradient in zip(distinct, found, strict=True):
            if gradient is not None:
                by_run.setdefault(key, []).append(gradient.to(z.dtype))
    out: Gradients = {}
    for key in list(by_run):
        # One run at a time is held twice.
        mine = by_run.pop(key)
        out[key] = mine[0].unsqueeze(0) if len(mine) == 1 else torch.stack(mine)
    return out


def make_pieces(
    uses: Iterable[Use], places: Mapping[tuple[int, int], Layout], z: Tensor, lacking: Collection[int]
) -> tuple[list[Piece], set[int]]:
    """Sort the uses of a batch by parameter and entries, and prepare what their gradients need.

    Args:
        uses: Of n points.
        places: Where the points lie at each use: by number of the parameter and of its use.
        z: The outputs (n, D).
        lacking: Numbers of parameters that are left out.

    Returns:
        The pieces; and the numbers of parameters without pieces, because a use is not in ``places``, has another shape
        or was overwritten, or because their uses do not add up to pieces.
    """
    n, wrong = len(z), set[int]()
    seen: Counter[int] = Counter()
    groups: dict[tuple[Any, ...], list[list[Use]]] = {}
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
        alike = groups.setdefault(_way(use), [])
        mine = next((group for group in alike if _same_entries(group[0], use)), None)
        if mine is None:
            alike.append([use])
        else:
            mine.append(use)
    pieces: list[Piece] = []
    parts: dict[int, list[Part]] = {}
    for group in chain.from_iterable(groups.values()):
        number = group[0].selection.number
        part = None if number in wrong else _make_part(group, n, z.dtype)
        if part is None:
            wrong.add(number)
        else:
            pieces.append(Piece(number, part, group))
            parts.setdefault(number, []).append(part)
    # Squares of sums over several parts are no sums of squares.
    wrong |= {number for number, several in parts.items() if _overlap(several)}
    return [piece for piece in pieces if piece.number not in wrong], wrong


def _way(use: Use) -> tuple[Any, ...]:
    """Return the parameter, the rule and the shape of the entries, without axes only aligned with an output.

    Positions of uses of the same entries in the same way fit into one row.
    """
    kind = "matrix" if use.kind in ("linear", "convolution") else use.kind
    aligned = takewhile(lambda size: size == 1, use.shape) if use.kind == "entrywise" else ()
    return use.selection.number, kind, use.shape[len(list(aligned)) :], use.options.get("groups", 1)


def _same_entries(a: Use, b: Use) -> bool:
    one, other = a.selection.entries, b.selection.entries
    if one is None or other is None:
        return one is other
    return torch.equal(one.flatten(), other.flatten())


def _overlap(parts: list[Part]) -> bool:
    """Return whether several parts of one parameter share an entry."""
    if len(parts) < 2:
        return False
    entries = [part.entries for part in parts if part.entries is not None]
    return len(entries) < len(parts) or torch.cat(entries).unique().numel() < sum(map(len, entries))


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
