"""A batch that has run through an encoder, with the parts of its parameters and the gradients that arrive at them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from contrastive_curvature.hessian.blocks import SignedFactor
from contrastive_curvature.hessian.cross import CrossBlocks, tangent_axes
from contrastive_curvature.hessian.node_blocks import NodeBlocks
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.network.layer_parts import EmbeddingPart, EntryPart, MatrixPart, Part
from contrastive_curvature.network.recorder import Layout, Run, Use, by_point

__all__ = ["Gradients", "Piece", "Tape", "check_alike", "cross_diagonals", "make_pieces", "shared_columns"]

Gradients = dict[int, list[Tensor]]
"""By the ``id`` of a run: the gradient at its output for each of K cotangents. A run that none reaches is left out."""


Stacks = dict[tuple[int, Layout], Tensor]
"""By run and layout: the gradients of K cotangents, shape (K, n, ...)."""


class NotVerifiedError(Exception):
    """A batch uses parameters in another way than the batch that was compared with autograd.

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
        uses: Its uses, and where the points of each lie.
    """

    number: int
    part: Part
    uses: list[tuple[Use, Layout]]

    @property
    def runs(self) -> list[Run]:
        """The runs whose gradients it needs."""
        return [use.run for use, _ in self.uses]

    def gradients(self, found: Gradients, n: int, dtype: torch.dtype, stacks: Stacks | None = None) -> Tensor | None:
        """Gradients of K cotangents as the part takes them; ``None`` where none reaches it.

        Args:
            found: At the runs.
            n: Number of points.
            dtype: Of the outputs.
            stacks: Those of other pieces, which share runs; filled.
        """
        stacks = {} if stacks is None else stacks
        present = [found.get(id(use.run)) for use, _ in self.uses]
        if all(p is None for p in present):
            return None
        many = next(len(p) for p in present if p is not None)
        made = []
        for (use, layout), columns in zip(self.uses, present, strict=True):
            if columns is None:
                zero = next(p[0] for p in present if p is not None).new_zeros(())
                columns = [zero.expand(use.run.shape)] * many
            key = (id(use.run), layout)
            if key not in stacks:
                views = [by_point(column.to(dtype), layout, n) for column in columns]
                stacks[key] = views[0].unsqueeze(0) if many == 1 else torch.stack(views)
            made.append(_ordered(use, layout, stacks[key]))
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
        """Gradients at what the layers put out.

        Args:
            columns: Cotangents, each (n, D).
            pieces: Those whose gradients are wanted; all by default.
        """
        runs = {id(run): run for piece in (self.pieces if pieces is None else pieces) for run in piece.runs}
        out: Gradients = {}
        if not self.z.requires_grad or not runs:
            return out
        edges = [run.edge for run in runs.values()]
        for column in columns:
            found = torch.autograd.grad(self.z, edges, column, retain_graph=True, allow_unused=True)
            for key, gradient in zip(runs, found, strict=True):
                if gradient is not None:
                    out.setdefault(key, []).append(gradient)
        return out

    def by_piece(self, columns: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Pieces with the gradients of columns (K, n, D), without those that none reaches."""
        found = self.gradients(columns)
        stacks: Stacks = {}
        for piece in self.pieces:
            if stacks and not stacks.keys() & {(id(use.run), layout) for use, layout in piece.uses}:
                # Neighbours share runs, as a weight and its bias.
                stacks.clear()
            b = piece.gradients(found, len(self.z), self.z.dtype, stacks)
            if b is not None:
                yield piece, b


def make_pieces(uses: Sequence[tuple[Use, Layout]], n: int, dtype: torch.dtype) -> tuple[list[Piece], set[int]]:
    """Sort uses by parameter and entries, and prepare what their gradients need.

    Args:
        uses: With where the points of each lie.
        n: Number of points.
        dtype: Of the outputs.

    Returns:
        The pieces, and the numbers of the parameters whose uses do not add up to pieces.
    """
    groups: list[list[tuple[Use, Layout]]] = []
    for pair in uses:
        mine = next((g for g in groups if _alike(g[0][0], pair[0])), None)
        if mine is None:
            groups.append([pair])
        else:
            mine.append(pair)
    pieces, failed = [], set()
    for group in groups:
        number = group[0][0].selection.number
        part = _make_part(group, n, dtype)
        if part is None:
            failed.add(number)
        else:
            pieces.append(Piece(number, part, group))
    by_number: dict[int, list[Part]] = {}
    for piece in pieces:
        by_number.setdefault(piece.number, []).append(piece.part)
    for number, parts in by_number.items():
        if len(parts) > 1 and not _disjoint(parts):
            # Squares of sums over several parts are no sums of squares.
            failed.add(number)
    return [piece for piece in pieces if piece.number not in failed], failed


def _alike(a: Use, b: Use) -> bool:
    """Whether two uses are of the same entries in the same way, so that their positions can be put in one row."""
    if a.selection.number != b.selection.number or _family(a) != _family(b) or _own_shape(a) != _own_shape(b):
        return False
    one, other = a.selection.entries, b.selection.entries
    if (one is None) != (other is None):
        return False
    if (
        one is not None
        and other is not None
        and not (one.numel() == other.numel() and torch.equal(one.flatten(), other.flatten()))
    ):
        return False
    return a.options.get("groups", 1) == b.options.get("groups", 1)


def _family(use: Use) -> str:
    return "matrix" if use.kind in ("linear", "convolution") else use.kind


def _own_shape(use: Use) -> tuple[int, ...]:
    """Shape of the entries, without axes that were only aligned with an output."""
    start = next((j for j, size in enumerate(use.shape) if size > 1), len(use.shape)) if use.kind == "entrywise" else 0
    return tuple(use.shape[start:])


def _disjoint(parts: list[Part]) -> bool:
    if any(part.entries is None for part in parts):
        return False
    together = torch.cat([part.entries for part in parts if part.entries is not None])
    return together.unique().numel() == together.numel()


def _make_part(group: list[tuple[Use, Layout]], n: int, dtype: torch.dtype) -> Part | None:
    first = group[0][0]
    entries = first.selection.entries
    flat = None if entries is None else entries.flatten()
    device = None if first.source is None else first.source.device
    distinct = flat is None or flat.unique().numel() == flat.numel()
    if first.kind == "entrywise":
        factors = _factors(group, n, dtype)
        device = first.run.device
        if flat is None:
            return EntryPart(factors, first.shape.numel())
        if distinct:
            return EntryPart(factors, flat.numel(), None, flat.to(device))
        chosen, places = flat.unique(return_inverse=True)
        return EntryPart(factors, chosen.numel(), places.to(device), chosen.to(device))
    if not distinct:
        return None
    moved = None if flat is None or device is None else flat.to(device)
    if first.kind == "embedding":
        tokens = torch.cat([_tokens(use, layout, n) for use, layout in group], dim=1)
        return EmbeddingPart(tokens, (first.shape[0], first.shape[1]), moved)
    inputs = [_inputs(use, layout, n, dtype) for use, layout in group]
    channels = first.shape[0] // inputs[0].shape[1]
    return MatrixPart(inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=2), channels, moved)


def _ordered(use: Use, layout: Layout, b: Tensor) -> Tensor:
    """Gradients (K, n, m, *rest) as the part takes them."""
    many, n, m = b.shape[:3]
    if use.kind == "linear":
        return b.reshape(many, n, 1, -1, b.shape[-1])
    if use.kind == "embedding":
        return b.reshape(many, n, -1, b.shape[-1])
    if use.kind == "convolution":
        groups = use.options.get("groups", 1)
        split = b.flatten(4).unflatten(3, (groups, -1)).permute(0, 1, 3, 2, 5, 4)
        return split[:, :, :, 0] if m == 1 else split.flatten(3, 4)
    return _entries_last(use, layout, b, 3)


def _entries_last(use: Use, layout: Layout, t: Tensor, start: int) -> Tensor:
    """(..., m, *rest) as (..., positions, entries), with the axes of the output from ``start`` on."""
    aligned = list(use.shape)
    del aligned[layout.axis]
    kept = [start + j for j, size in enumerate(aligned) if size != 1]
    summed = [j for j in range(start - 1, t.ndim) if j not in kept]
    count = 1
    for j in kept:
        count *= t.shape[j]
    return t.permute(*range(start - 1), *summed, *kept).reshape(*t.shape[: start - 1], -1, count)


def _factors(group: list[tuple[Use, Layout]], n: int, dtype: torch.dtype) -> Tensor | None:
    if all(use.source is None for use, _ in group):
        return None
    made = []
    for use, layout in group:
        source = torch.ones((), dtype=dtype, device=use.run.device) if use.source is None else use.source.to(dtype)
        made.append(_entries_last(use, layout, by_point(source.expand(use.run.shape), layout, n), 2))
    return made[0] if len(made) == 1 else torch.cat(made, dim=1)


def _tokens(use: Use, layout: Layout, n: int) -> Tensor:
    """Tokens (n, T); -1 for the padding index, whose row has no gradient."""
    if use.source is None:
        msg = "an embedding without tokens"
        raise TypeError(msg)
    tokens = by_point(use.source, layout, n).reshape(n, -1)
    padding = use.options.get("padding_idx")
    if padding is None:
        return tokens
    padding = padding + use.shape[0] if padding < 0 else padding
    return tokens.masked_fill(tokens == padding, -1)


def _inputs(use: Use, layout: Layout, n: int, dtype: torch.dtype) -> Tensor:
    """What the matrix is multiplied with, shape (n, groups, positions, inputs of a group)."""
    if use.source is None:
        msg = "a layer without inputs"
        raise TypeError(msg)
    a = use.source.to(dtype)
    if use.kind == "linear":
        return by_point(a, layout, n).reshape(n, 1, -1, a.shape[-1])
    windows = by_point(_windows(a, use), layout, n)
    split = windows.unflatten(2, (use.options.get("groups", 1), -1)).permute(0, 2, 1, 4, 3)
    return split[:, :, 0] if split.shape[2] == 1 else split.flatten(2, 3)


def _windows(a: Tensor, use: Use) -> Tensor:
    """What a convolution multiplies its weight with, shape (N, inputs, positions)."""
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


_HELD_ELEMENTS = 2**27
"""Numbers that the gradients of all outputs at some layers may hold: 512 MiB in float32; fewer need more passes."""


def cross_diagonals(left: Tape, right: Tape, cross: CrossBlocks) -> Iterator[tuple[Piece, Tensor]]:
    """Diagonals of ``sum_ij J_i^T H_ij J_j``, one piece after the other.

    Args:
        left: The points i.
        right: The points j; may be the same object.
        cross: The blocks.

    Raises:
        NotVerifiedError: The two sides use the parameters in different ways.
    """
    check_alike(left, right)
    pairs = list(zip(left.pieces, right.pieces, strict=True))
    dim = left.z.shape[1]
    points = len(left.z) + (0 if right is left else len(right.z))
    for group in _groups(pairs, dim * points // max(1, len(left.z))):
        of_left = _axes(left, [a for a, _ in group])
        of_right = of_left if right is left else _axes(right, [b for _, b in group])
        for a, b in group:
            rows = a.gradients(of_left, len(left.z), left.z.dtype)
            columns = rows if right is left else b.gradients(of_right, len(right.z), right.z.dtype)
            if rows is not None and columns is not None:
                yield a, a.part.cross(rows, b.part, columns, cross)


def check_alike(left: Tape, right: Tape) -> None:
    """Refuse two sides that use the parameters in different ways.

    Raises:
        NotVerifiedError: They do.
    """
    numbers = [piece.number for piece in left.pieces]
    if numbers != [piece.number for piece in right.pieces]:
        raise NotVerifiedError({*numbers, *(piece.number for piece in right.pieces)})


def shared_columns(hessian: OutputHessian) -> tuple[Tensor, Tensor, SignedFactor] | None:
    """A coupled Hessian as columns that all points share, and columns of each point.

    ``H_ij = sum_k w_ij a_ki a_kj^T + [i = j] sum_c sign_ci v_ci v_ci^T`` with the tangent axes
    ``a_ki = P_i e_k / n_i``: the multiple of the projector in the diagonal blocks is one more weight of these axes, so
    that two columns stay for the rest of the blocks.

    Args:
        hessian: Of N points.

    Returns:
        The columns ``a`` (D, N, D), the weights ``w`` (N, N) and the other columns; ``None`` for another Hessian.
    """
    blocks = hessian.blocks
    everything = slice(0, len(hessian))
    cross = hessian.cross(everything, everything)
    if not isinstance(blocks, NodeBlocks) or cross.c is not None or cross.roots is not None:
        return None
    weight = -cross.y
    weight.diagonal().add_(blocks.c * hessian.n.square())
    plane = torch.stack([blocks.r, blocks.q, blocks.q, blocks.p], dim=1).view(-1, 2, 2)
    values, turn = torch.linalg.eigh(plane)
    vectors = torch.stack([blocks.u, blocks.t], dim=2) @ (turn * values.abs().sqrt().unsqueeze(1))
    rest = SignedFactor(vectors.permute(2, 0, 1), values.sign().T)
    return tangent_axes(hessian.u, hessian.n).transpose(0, 1), weight, rest


def _axes(tape: Tape, pieces: list[Piece]) -> dict[int, list[Tensor]]:
    axes = torch.eye(tape.z.shape[1], dtype=tape.z.dtype, device=tape.z.device)
    return tape.gradients((axis.expand(len(tape.z), -1) for axis in axes), pieces)


def _groups(pairs: list[tuple[Piece, Piece]], copies: int) -> Iterator[list[tuple[Piece, Piece]]]:
    """Pieces whose gradients fit into memory together; from the last layers to the first, whose passes are longer."""
    group: list[tuple[Piece, Piece]] = []
    runs: set[int] = set()
    held = 0
    for pair in reversed(pairs):
        new = {id(run): run for run in pair[0].runs if id(run) not in runs}
        size = copies * sum(run.shape.numel() for run in new.values())
        if group and held + size > _HELD_ELEMENTS:
            yield group
            group, runs, held = [], set(), 0
            size = copies * sum(run.shape.numel() for run in pair[0].runs)
        group.append(pair)
        runs.update(id(run) for run in pair[0].runs)
        held += size
    if group:
        yield group
