"""Detection of a few points that contribute most of a curvature, which then says little about all other points.

There are two causes. The first is a point whose output is nearly zero: its Hessian grows with ``1 / norm^2``. If one
batch contributes more than all others together, a binary search in this batch finds the point. The second is a few
points with huge inputs, which dominate the input factors of Kronecker pairs even if their own curvature is small. One
run of the encoder per batch measures the inputs of all layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.network.pullback import KronFactors, Pullback
from contrastive_curvature.options import Structure
from contrastive_curvature.parts.contributions import (
    FEWEST_POINTS,
    MOST,
    STORED,
    Contributions,
    InputSizes,
    Place,
    warn_of_point,
)

__all__ = ["FEWEST_POINTS", "MOST", "Dominance", "warn_of_point"]


class _Batch(NamedTuple):
    place: Place
    context: Any
    size: int
    blocks: Blocks
    sizes: Tensor


class Dominance:
    """Records how much each batch and each large input contributes to a curvature, and warns of dominating points.

    Args:
        pullback: Pullback to the parameters.
        structure: Structure of the curvature.
        part: Index of the part of the data; -1 for all of it.
    """

    def __init__(self, pullback: Pullback, structure: Structure, part: int = -1) -> None:
        self._pullback, self._structure, self._part = pullback, structure, part
        self._total: Tensor | None = None
        self._count = self._batches = 0
        self._first: _Batch | None = None
        self._dominating: dict[int, tuple[float, Place]] = {}
        self._inputs: dict[str, InputSizes] = {}

    def add(self, context: Any, size: int, blocks: Blocks, term: Tensor | KronFactors) -> None:
        """Record the contribution of one batch."""
        start = Place(self._batches, 0, self._count, self._part)
        if self._structure is Structure.KRON:
            for layer, inputs in self._pullback.input_sizes(context).items():
                self._inputs[layer] = self._inputs.get(layer, InputSizes()).merged(_largest(inputs, start))
        sizes = _sizes(term)
        self._total = sizes if self._total is None else self._total + sizes
        batch = _Batch(start, context, size, blocks, sizes)
        self._count, self._batches = self._count + size, self._batches + 1
        if self._first is None:
            # The first batch always exceeds the others so far. It is compared when all others are known.
            self._first = batch
        elif bool((sizes > MOST * self._total).any()):
            self._search_batch(batch)

    def contributions(self) -> Contributions:
        """Return what is known of the points that were added, to be merged with those of other parts of the data."""
        if self._total is None or self._first is None:
            return Contributions(0, (), (), {}, {})
        # A part of few points may be one of many.
        tells = self._count >= FEWEST_POINTS or self._part >= 0
        if tells and bool((self._first.sizes > MOST * self._total).any()):
            self._search_batch(self._first)
        names = tuple(self._part_name(k) for k in range(len(self._total)))
        return Contributions(self._count, tuple(self._total.tolist()), names, self._dominating, self._inputs)

    def _search_batch(self, batch: _Batch) -> None:
        if self._total is None:
            return
        threshold = MOST * self._total

        def bisect(start: int, stop: int, sizes: Tensor) -> None:
            parts = (sizes > threshold).nonzero().flatten().tolist()
            if not parts:
                return
            if stop - start == 1:
                place = Place(batch.place.batch, start, batch.place.point + start, self._part)
                for k in parts:
                    if k not in self._dominating or float(sizes[k]) > self._dominating[k][0]:
                        self._dominating[k] = float(sizes[k]), place
                return
            middle = (start + stop) // 2
            rows = slice(start, middle)
            left = _sizes(self._measure(self._pullback.slice_context(batch.context, rows), batch.blocks[rows]))
            bisect(start, middle, left)
            bisect(middle, stop, sizes - left)

        bisect(0, batch.size, batch.sizes)

    def _measure(self, context: Any, blocks: Blocks) -> Tensor | KronFactors:
        if self._structure is Structure.KRON:
            return self._pullback.kron_factors(context, blocks, 1)
        return self._pullback.block_term(context, blocks, Structure.DIAG)

    def _part_name(self, part: int) -> str:
        if self._structure is not Structure.KRON:
            return ""
        return f"curvature factor of {self._pullback.parameter_name(part)!r}"


def _largest(sizes: Tensor, start: Place) -> InputSizes:
    values, rows = sizes.topk(min(STORED, sizes.numel()))
    found = [
        (value, Place(start.batch, row, start.point + row, start.part))
        for value, row in zip(values.tolist(), rows.tolist(), strict=True)
    ]
    return InputSizes(float(sizes.sum()), tuple(found))


def _sizes(term: Tensor | KronFactors) -> Tensor:
    """Return the sum of the absolute diagonal: of the matrix, shape (1,), or of each of G factors, shape (G,)."""
    if isinstance(term, Tensor):
        return (term if term.ndim == 1 else term.diagonal()).abs().sum().reshape(1)
    return torch.stack([group[0].diagonal().abs().sum() for group in term])
