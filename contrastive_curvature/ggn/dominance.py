"""Whether few points carry most of a curvature, which then says little about all the others.

Two causes are looked for. A point whose output is next to zero has a Hessian that goes with ``1 / norm^2``; it is found
from what the batches add: where one batch outweighs all others together, it is halved, again and again. And few points
with huge inputs make up the input factors of Kronecker pairs, however small their own curvature is; the sizes of all
layer inputs are taken from one run of the encoder a batch.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.network.pullback import KronFactors, Pullback
from contrastive_curvature.options import Structure

__all__ = ["FEWEST_POINTS", "MOST", "Dominance", "warn_of_point"]

FEWEST_POINTS = 32
"""Of fewer points, one may well carry most of the curvature."""

MOST = 0.8
"""Share of a curvature from which on points are said to carry it. Outputs that happen to be short reach a half."""

_FEW = 0.1
"""Share of the points that are called few."""

_KEPT = 16
"""Largest inputs of a layer that are kept."""


class _Place(NamedTuple):
    batch: int
    row: int
    point: int


class _Batch(NamedTuple):
    place: _Place
    context: Any
    size: int
    blocks: Blocks
    sizes: Tensor


class Dominance:
    """Watches the terms of a fit.

    Args:
        pullback: The parameters.
        structure: Of the terms.
        n_data: Number of points over which the input factors of ``kron`` are averaged.
    """

    def __init__(self, pullback: Pullback, structure: Structure, n_data: int) -> None:
        self._pullback, self._structure, self._n_data = pullback, structure, n_data
        self._total: Tensor | None = None
        self._count = self._batches = 0
        self._first: _Batch | None = None
        self._found: dict[int, tuple[float, _Place]] = {}
        self._inputs: dict[str, _LargestInputs] = {}

    def add(self, context: Any, size: int, blocks: Blocks, term: Tensor | KronFactors) -> None:
        """Take in what a batch adds.

        Args:
            context: Of its points.
            size: How many these are.
            blocks: Their diagonal blocks.
            term: What was made of these alone.
        """
        start = _Place(self._batches, 0, self._count)
        if self._structure is Structure.KRON:
            for layer, inputs in self._pullback.input_sizes(context).items():
                self._inputs.setdefault(layer, _LargestInputs()).add(inputs, start)
        sizes = _sizes(term)
        self._total = sizes if self._total is None else self._total + sizes
        batch = _Batch(start, context, size, blocks, sizes)
        self._count, self._batches = self._count + size, self._batches + 1
        if self._first is None:
            # It is all there is so far, and says nothing before others have come.
            self._first = batch
        elif bool((sizes > MOST * self._total).any()):
            self._search(batch)

    def warn(self) -> None:
        """Say which points carry most of the curvature, if few do."""
        if self._total is None or self._first is None or self._count < FEWEST_POINTS:
            return
        few = max(1, int(_FEW * self._count))
        large = [(*inputs.few_that_carry_most(few), layer) for layer, inputs in self._inputs.items()]
        if large and max(large)[0] > MOST:
            share, places, layer = max(large)
            _warn_of_inputs(share, places, layer)
            return
        if bool((self._first.sizes > MOST * self._total).any()):
            self._search(self._first)
        shares = {k: size / float(self._total[k]) for k, (size, _) in self._found.items()}
        part = max(shares, key=lambda k: shares[k], default=None)
        if part is not None and shares[part] > MOST:
            place = self._found[part][1]
            where = f"point {place.point} of the pass over the data (row {place.row} of batch {place.batch})"
            warn_of_point(shares[part], where, self._part_name(part))

    def _search(self, batch: _Batch) -> None:
        if self._total is None:
            return
        enough = MOST * self._total

        def halve(start: int, stop: int, sizes: Tensor) -> None:
            parts = (sizes > enough).nonzero().flatten().tolist()
            if not parts:
                return
            if stop - start == 1:
                place = _Place(batch.place.batch, start, batch.place.point + start)
                for k in parts:
                    if k not in self._found or float(sizes[k]) > self._found[k][0]:
                        self._found[k] = float(sizes[k]), place
                return
            middle = (start + stop) // 2
            rows = slice(start, middle)
            left = _sizes(self._measure(self._pullback.slice_context(batch.context, rows), batch.blocks[rows]))
            halve(start, middle, left)
            halve(middle, stop, sizes - left)

        halve(0, batch.size, batch.sizes)

    def _measure(self, context: Any, blocks: Blocks) -> Tensor | KronFactors:
        if self._structure is Structure.KRON:
            return self._pullback.kron_factors(context, blocks, self._n_data)
        return self._pullback.block_term(context, blocks, Structure.DIAG)

    def _part_name(self, part: int) -> str:
        if self._structure is not Structure.KRON:
            return ""
        return f"curvature factor of {self._pullback.parameter_name(part)!r}"


class _LargestInputs:
    """The points with the largest inputs of a layer."""

    def __init__(self) -> None:
        self._total = 0.0
        self._largest: list[tuple[float, _Place]] = []

    def add(self, sizes: Tensor, start: _Place) -> None:
        self._total += float(sizes.sum())
        values, rows = sizes.topk(min(_KEPT, sizes.numel()))
        new = [
            (value, _Place(start.batch, row, start.point + row))
            for value, row in zip(values.tolist(), rows.tolist(), strict=True)
        ]
        self._largest = sorted([*self._largest, *new], reverse=True)[:_KEPT]

    def few_that_carry_most(self, few: int) -> tuple[float, list[_Place]]:
        """The share of as few points as carry most, and which they are; of at most so many."""
        share, places = 0.0, []
        for size, place in self._largest[:few]:
            share += size / self._total if self._total else 0.0
            places.append(place)
            if share > MOST:
                break
        return share, places


def _warn_of_inputs(share: float, places: list[_Place], layer: str) -> None:
    shown = ", ".join(f"{place.point} (row {place.row} of batch {place.batch})" for place in places[:5])
    which = f"point {shown}" if len(places) == 1 else f"points {shown}" + (" and others" if len(places) > 5 else "")
    whose = "One point carries" if len(places) == 1 else f"{len(places)} points carry"
    msg = (
        f"{whose} {100 * share:.0f} % of the curvature (input factor of layer {layer!r}): {which} of the pass over the "
        "data. Inputs so much larger than all others make the posterior, and a prior that is chosen from it, too "
        "certain of everything else. Leave them out, or clip them."
    )
    warnings.warn(msg, UserWarning, stacklevel=2)


def warn_of_point(share: float, point: str, part: str = "") -> None:
    """Warn that one point carries most of a curvature.

    Args:
        share: Of the curvature, or of a part of it.
        point: Which point.
        part: Which part; empty for the whole.
    """
    whole = f"the curvature ({part})" if part else "the curvature"
    msg = (
        f"One point carries {100 * share:.0f} % of {whole}: {point}. Its output may be next to zero, where the Hessian "
        "grows with 1 / norm^2. The posterior, and a prior that is chosen from it, say more about this point than "
        "about all others. Look at its input and at the norm of its output; leave it out if it is no example."
    )
    warnings.warn(msg, UserWarning, stacklevel=2)


def _sizes(term: Tensor | KronFactors) -> Tensor:
    """Sum of the absolute diagonal: of the whole, shape (1,), or of every curvature factor."""
    if isinstance(term, Tensor):
        return (term if term.ndim == 1 else term.diagonal()).abs().sum().reshape(1)
    return torch.stack([group[0].diagonal().abs().sum() for group in term])
