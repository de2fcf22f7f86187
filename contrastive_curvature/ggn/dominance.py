"""Detection of a few points that contribute most of a curvature, which then says little about all other points.

There are two causes. The first is a point whose output is nearly zero: its Hessian grows with ``1 / norm^2``. If one
batch contributes more than all others together, a binary search in this batch finds the point. The second is a few
points with huge inputs, which dominate the input factors of Kronecker pairs even if their own curvature is small. One
run of the encoder per batch measures the inputs of all layers.
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
"""With fewer points than this, one point may well contribute most of the curvature, so there is no warning."""

MOST = 0.8
"""Fraction of a curvature above which points are said to dominate it. Ordinary outputs of small norm can reach 0.5."""

_FEW_FRACTION = 0.1
"""Largest fraction of the points that counts as a few points."""

_STORED = 16
"""How many of the largest inputs of a layer are stored."""


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
    """Records how much each batch and each large input contributes to a curvature, and warns of dominating points.

    Args:
        pullback: Pullback to the parameters.
        structure: Structure of the curvature.
        n_data: Number of points over which the input factors of ``kron`` are averaged.
    """

    def __init__(self, pullback: Pullback, structure: Structure, n_data: int) -> None:
        self._pullback, self._structure, self._n_data = pullback, structure, n_data
        self._total: Tensor | None = None
        self._count = self._batches = 0
        self._first: _Batch | None = None
        self._dominating: dict[int, tuple[float, _Place]] = {}
        self._inputs: dict[str, _LargestInputs] = {}

    def add(self, context: Any, size: int, blocks: Blocks, term: Tensor | KronFactors) -> None:
        """Record the contribution of one batch.

        Args:
            context: Context of the pullback for the batch.
            size: Number of points in the batch.
            blocks: Diagonal blocks of the Hessian at these points.
            term: Curvature computed from these blocks alone.
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
            # The first batch always exceeds the others so far. It is compared in warn(), when all others are known.
            self._first = batch
        elif bool((sizes > MOST * self._total).any()):
            self._search_batch(batch)

    def warn(self) -> None:
        """Warn if a few points contribute most of the curvature, and name them."""
        if self._total is None or self._first is None or self._count < FEWEST_POINTS:
            return
        few = max(1, int(_FEW_FRACTION * self._count))
        large = [(*inputs.fewest_dominating(few), layer) for layer, inputs in self._inputs.items()]
        if large and max(large)[0] > MOST:
            fraction, places, layer = max(large)
            _warn_of_inputs(fraction, places, layer)
            return
        if bool((self._first.sizes > MOST * self._total).any()):
            self._search_batch(self._first)
        fractions = {k: size / float(self._total[k]) for k, (size, _) in self._dominating.items()}
        part = max(fractions, key=lambda k: fractions[k], default=None)
        if part is not None and fractions[part] > MOST:
            place = self._dominating[part][1]
            where = f"point {place.point} of the pass over the data (row {place.row} of batch {place.batch})"
            warn_of_point(fractions[part], where, self._part_name(part))

    def _search_batch(self, batch: _Batch) -> None:
        if self._total is None:
            return
        threshold = MOST * self._total

        def bisect(start: int, stop: int, sizes: Tensor) -> None:
            parts = (sizes > threshold).nonzero().flatten().tolist()
            if not parts:
                return
            if stop - start == 1:
                place = _Place(batch.place.batch, start, batch.place.point + start)
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
        values, rows = sizes.topk(min(_STORED, sizes.numel()))
        new = [
            (value, _Place(start.batch, row, start.point + row))
            for value, row in zip(values.tolist(), rows.tolist(), strict=True)
        ]
        self._largest = sorted([*self._largest, *new], reverse=True)[:_STORED]

    def fewest_dominating(self, few: int) -> tuple[float, list[_Place]]:
        """Fraction and points of the smallest dominating set, or of the ``few`` largest points if none dominates."""
        fraction, places = 0.0, []
        for size, place in self._largest[:few]:
            fraction += size / self._total if self._total else 0.0
            places.append(place)
            if fraction > MOST:
                break
        return fraction, places


def _warn_of_inputs(fraction: float, places: list[_Place], layer: str) -> None:
    shown = ", ".join(f"{place.point} (row {place.row} of batch {place.batch})" for place in places[:5])
    which = f"point {shown}" if len(places) == 1 else f"points {shown}" + (" and others" if len(places) > 5 else "")
    subject = "One point contributes" if len(places) == 1 else f"{len(places)} points contribute"
    msg = (
        f"{subject} {100 * fraction:.0f} % of the curvature (input factor of layer {layer!r}): {which} of the "
        "pass over the data. Inputs so much larger than all others make the posterior, and a prior that is chosen "
        "from the curvature, too certain for all other inputs. Leave these points out, or clip their inputs."
    )
    warnings.warn(msg, UserWarning, stacklevel=2)


def warn_of_point(fraction: float, point: str, part: str = "") -> None:
    """Warn that one point contributes most of a curvature.

    Args:
        fraction: Fraction of the curvature, or of the named part of it, that the point contributes.
        point: Description of the point, for the message.
        part: Description of the part of the curvature; empty for the whole.
    """
    whole = f"the curvature ({part})" if part else "the curvature"
    msg = (
        f"One point contributes {100 * fraction:.0f} % of {whole}: {point}. Its output may be nearly zero, where the "
        "Hessian grows with 1 / norm^2. The posterior, and a prior that is chosen from the curvature, say more about "
        "this point than about all others. Check its input and the norm of its output; leave the point out if it is "
        "not a valid example."
    )
    warnings.warn(msg, UserWarning, stacklevel=2)


def _sizes(term: Tensor | KronFactors) -> Tensor:
    """Sum of the absolute diagonal: of the whole matrix, shape (1,), or of each of G curvature factors, shape (G,)."""
    if isinstance(term, Tensor):
        return (term if term.ndim == 1 else term.diagonal()).abs().sum().reshape(1)
    return torch.stack([group[0].diagonal().abs().sum() for group in term])
