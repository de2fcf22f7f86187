"""A batch that has run through an encoder, with the blocks of its parameters and the gradients that arrive at them."""

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

from contrastive_curvature.network.layer_parts import (
    BlockJacobian,
    EmbeddingJacobian,
    EntrywiseJacobian,
    MatrixJacobian,
)
from contrastive_curvature.network.recorder import BatchAxis, Call, ParameterUse, by_point, fits

Gradients = dict[int, Tensor]
"""By the ``id`` of a call: the gradients at its output for K cotangents, shape (K, *output), without those that none
reaches."""


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

    def gradients(self, found: Gradients, n: int) -> Tensor | None:
        """Return gradients of K cotangents of n points as its Jacobian takes them; ``None`` where none arrives."""
        reached = [found[id(call)] for call in self.calls if id(call) in found]
        if not reached:
            return None
        made = []
        for use in self.uses:
            nothing = reached[0].new_zeros(()).expand(len(reached[0]), *use.call.shape)
            b = by_point(found.get(id(use.call), nothing), use.batch_axis._replace(axis=use.batch_axis.axis + 1), n)
            made.append(_ordered(use, b.movedim(2, 0)))
        return made[0] if len(made) == 1 else torch.cat(made, dim=-2)


class Tape:
    """Raw outputs of n points with their graph, and the blocks of the parameters.

    Args:
        z: Shape (n, D).
        blocks: Of the parameters that the network uses in ways with a rule.
    """

    def __init__(self, z: Tensor, blocks: list[ParameterBlock]) -> None:
        self.z, self.blocks = z, blocks

    @property
    def axes(self) -> Tensor:
        """The cotangents of every output alone, shape (D, n, D)."""
        eye = torch.eye(self.z.shape[1], dtype=self.z.dtype, device=self.z.device)
        return eye.unsqueeze(1).expand(-1, len(self.z), -1)

    def gradients(self, columns: Tensor, blocks: Sequence[ParameterBlock] | None = None) -> Gradients:
        """Return gradients of cotangents (K, n, D) at the calls of some blocks, or of all."""
        calls = [call for block in (self.blocks if blocks is None else blocks) for call in block.calls]
        return gradients_at(self.z, calls, columns)

    def by_block(self, columns: Tensor) -> Iterator[tuple[ParameterBlock, Tensor]]:
        """Yield blocks with the gradients of columns (K, n, D), without those that none reaches."""
        return self.reached(self.gradients(columns))

    def reached(self, found: Gradients) -> Iterator[tuple[ParameterBlock, Tensor]]:
        """Yield blocks with the gradients at their calls, without those that none reaches."""
        for block in self.blocks:
            b = block.gradients(found, len(self.z))
            if b is not None:
                yield block, b


def gradients_at(z: Tensor, calls: Iterable[Call], columns: Tensor) -> Gradients:
    """Return gradients of cotangents (K, n, D) of the outputs at some calls, in the type of the outputs."""
    distinct = {id(call): call for call in calls}
    if not z.requires_grad or not distinct:
        return {}
    edges = [call.edge for call in distinct.values()]
    by_run: dict[int, list[Tensor]] = {}
    for column in columns:
        found = torch.autograd.grad(z, edges, column, retain_graph=True, allow_unused=True)
        for key, gradient in zip(distinct, found, strict=True):
            if gradient is not None:
                by_run.setdefault(key, []).append(gradient.to(z.dtype))
    out: Gradients = {}
    for key in list(by_run):
        # One call at a time is held twice.
        mine = by_run.pop(key)
        out[key] = mine[0].unsqueeze(0) if len(mine) == 1 else torch.stack(mine)
    return out


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
        The blocks; and the numbers of parameters without blocks, because a use is not in ``places``, has another shape
        or was overwritten, or because their uses do not add up to blocks.
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
        if batch_axis is None or batch_axis.axis not in use.call.axes or not fits(use.call.shape, batch_axis, n):
            wrong.add(number)
            continue
        if use.source is not None and use.source._version != use.version:  # overwritten since
            wrong.add(number)
            continue
        use.batch_axis = batch_axis
        alike = groups.setdefault(_way(use), [])
        mine = next((group for group in alike if _same_entries(group[0], use)), None)
        if mine is None:
            alike.append([use])
        else:
            mine.append(use)
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
        chosen, places = flat.unique(return_inverse=True)
        if len(chosen) == len(flat):
            return EntrywiseJacobian(factors, len(flat), None, flat)
        return EntrywiseJacobian(factors, len(chosen), places, chosen)
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
    made = []
    for use in group:
        source = torch.ones((), dtype=dtype, device=use.call.device) if use.source is None else use.source.to(dtype)
        made.append(_entries_last(use, by_point(source.expand(use.call.shape), use.batch_axis, n), 2))
    return made[0] if len(made) == 1 else torch.cat(made, dim=1)


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
