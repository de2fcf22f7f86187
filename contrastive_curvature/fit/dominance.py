"""Detection of a few points that contribute most of a curvature, which then says little about all other points.

There are two causes. The first is a point whose output is nearly zero: its Hessian grows with ``1 / norm^2``. If one
batch contributes most of the sum, a binary search in this batch finds the point. The second is a few
points with huge inputs, which dominate the input factors of Kronecker pairs even if their own curvature is small. One
run of the encoder per batch measures the inputs of all layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from contrastive_curvature.fit.contributions import FEWEST_POINTS, MOST, STORED, Contributions, Largest, Place
from contrastive_curvature.fit.total import Part, Total
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.node_blocks import NodeBlocks
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.pairs.rows import united
from contrastive_curvature.structures import Diagonal, Kron, Structure


class _Batch(NamedTuple):
    place: Place
    context: Any
    blocks: Blocks
    sizes: Tensor


_NUMBERS = 2**24
"""Numbers of batches that wait to be searched; a GPU is waited for once for all of them."""


class _Inputs(NamedTuple):
    """A :class:`Largest` that stays on the device until the pass is over, so that batches do not wait for it.

    Attributes:
        total: Sum of the contributions of all points, float64, one number.
        values: The largest sizes, descending, shape (K,).
        places: Batch, row and point of each size, shape (K, 3).
    """

    total: Tensor
    values: Tensor
    places: Tensor

    def merged(self, other: _Inputs) -> _Inputs:
        """Merge the largest sizes of two sets of points."""
        values, places = torch.cat([self.values, other.values]), torch.cat([self.places, other.places])
        values, order = values.topk(min(STORED, values.numel()))
        return _Inputs(self.total + other.total, values, places[order])

    def largest(self, part: int) -> Largest:
        """Return sizes and places as Python's numbers."""
        places = [Place(batch, row, point, part) for batch, row, point in self.places.tolist()]
        return Largest(float(self.total), tuple(zip(self.values.tolist(), places, strict=True)))


class Dominance:
    """Records how much each batch and each large input contributes to a curvature, and warns of dominating points.

    Args:
        pullback: Pullback to the parameters.
        structure: Structure of the curvature.
        part: Index of the part of the data; -1 for all data.
    """

    def __init__(self, pullback: Pullback, structure: type[Structure], part: int = -1) -> None:
        self._pullback, self._part = pullback, part
        # For structures other than Kronecker factors, the diagonal is enough.
        self._factored = issubclass(structure, Kron)
        self._structure: type[Structure] = structure if self._factored else Diagonal
        self._total: Tensor | int = 0
        self._count = self._batches = 0
        self._waiting: list[_Batch] = []
        self._numbers = 0
        self._largest: dict[int, tuple[float, Place]] = {}
        self._inputs: dict[str, _Inputs] = {}

    def add(self, part: Part, term: Structure) -> None:
        """Record the contribution of one batch."""
        context, blocks = part.context, part.blocks
        if part.coupled is not None and not self._factored:
            # Cross terms nearly cancel the terms of single points, so points are compared without cross terms.
            term = Diagonal.term(self._pullback, context, blocks)
        start = Place(self._batches, 0, self._count, self._part)
        if self._factored:
            largest = {layer: _largest(sizes, start) for layer, sizes in self._pullback.input_sizes(context).items()}
            self._inputs = united(self._inputs, largest, _Inputs.merged)
        batch = _Batch(start, context, blocks, term.traces())
        self._total = self._total + batch.sizes
        self._count, self._batches = self._count + len(blocks), self._batches + 1
        self._waiting.append(batch)
        self._numbers += sum(part.numel() for part in tree_leaves((context, blocks.u)) if isinstance(part, Tensor))
        # Other blocks may hold all pairs of their batch.
        if self._numbers > _NUMBERS or not isinstance(blocks, NodeBlocks):
            self._search()

    def noted(self, total: Total) -> Total:
        """Return the sum with its largest points."""
        # A part of few points may be one of many parts, so it is searched too.
        if self._count >= FEWEST_POINTS or self._part >= 0:
            self._search()
        factors = {}
        for k, size in enumerate(torch.as_tensor(self._total).tolist()):
            name = f"curvature factor of {self._pullback.named_sizes()[k][0]!r}" if self._factored else ""
            factors[name] = Largest(size, (self._largest[k],) if k in self._largest else ())
        inputs = {layer: found.largest(self._part) for layer, found in self._inputs.items()}
        return replace(total, contributions=Contributions(self._count, factors, inputs))

    def _search(self) -> None:
        """Search the waiting batches for points that contribute most of the sum so far."""
        if not self._waiting:
            return
        threshold = MOST * torch.as_tensor(self._total)
        exceed = (torch.stack([batch.sizes for batch in self._waiting]) > threshold).any(1).tolist()
        for batch, exceeds in zip(self._waiting, exceed, strict=True):
            if exceeds:
                self._bisect(batch, threshold, 0, len(batch.blocks), batch.sizes)
        self._waiting, self._numbers = [], 0

    def _bisect(self, batch: _Batch, threshold: Tensor, start: int, stop: int, sizes: Tensor) -> None:
        """Record the points among ``start..stop`` of a batch that exceed a threshold; their sum has these sizes."""
        parts = (sizes > threshold).nonzero().flatten().tolist()
        if not parts:
            return
        if stop - start == 1:
            place = Place(batch.place.batch, start, batch.place.point + start, self._part)
            for k in parts:
                self._largest[k] = max(self._largest.get(k, (0.0, place)), (float(sizes[k]), place))
            return
        middle = (start + stop) // 2
        rows = slice(start, middle)
        some = self._pullback.slice_context(batch.context, rows)
        left = self._structure.term(self._pullback, some, batch.blocks[rows]).traces()
        self._bisect(batch, threshold, start, middle, left)
        self._bisect(batch, threshold, middle, stop, sizes - left)


def _largest(sizes: Tensor, start: Place) -> _Inputs:
    values, rows = sizes.topk(min(STORED, sizes.numel()))
    places = torch.stack([torch.full_like(rows, start.batch), rows, rows + start.point], dim=1)
    return _Inputs(sizes.sum().double(), values, places)
