"""Whether a single point carries most of a curvature: the posterior is then certain of everything, for no good reason.

Such a point has inputs or features that are larger than all others together, or an output next to zero, whose Hessian
goes with ``1 / norm^2``. The batches are compared by the size of what they add; only where one batch outweighs all
others together is it halved, again and again, until the point is found.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from contrastive_curvature.ggn.pullback import KronFactors, Points, Pullback
from contrastive_curvature.node_blocks import NodeBlocks
from contrastive_curvature.options import Structure

__all__ = ["FEWEST_POINTS", "MOST", "Dominance", "warn_of_point"]

FEWEST_POINTS = 32
"""Of fewer points, one may well carry most of the curvature."""

MOST = 0.8
"""Share of a curvature from which on a point is said to carry it. Outputs that happen to be short reach a half."""


class _Batch(NamedTuple):
    number: int
    start: int
    points: Points
    blocks: NodeBlocks
    sizes: Tensor


class _Found(NamedTuple):
    size: float
    batch: int
    row: int
    point: int


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
        self._factors: list[int] = []
        self._first: _Batch | None = None
        self._found: dict[int, _Found] = {}

    def add(self, points: Points, blocks: NodeBlocks, term: Tensor | KronFactors) -> None:
        """Take in what a batch adds: its points, their diagonal blocks, and the term that was made of these alone."""
        sizes = _sizes(term)
        if not isinstance(term, Tensor):
            self._factors = [len(group) for group in term]
        self._total = sizes if self._total is None else self._total + sizes
        batch = _Batch(self._batches, self._count, points, blocks, sizes)
        self._count, self._batches = self._count + len(points), self._batches + 1
        if self._first is None:
            # It is all there is so far, and says nothing before others have come.
            self._first = batch
        elif bool((sizes > MOST * self._total).any()):
            self._search(batch)

    def warn(self) -> None:
        """Say which point carries most of the curvature, if one does."""
        if self._total is None or self._first is None or self._count < FEWEST_POINTS:
            return
        if bool((self._first.sizes > MOST * self._total).any()):
            self._search(self._first)
        shares = {k: found.size / float(self._total[k]) for k, found in self._found.items()}
        if not shares or max(shares.values()) <= MOST:
            return
        part = max(shares, key=lambda k: shares[k])
        found = self._found[part]
        where = f"point {found.point} of the pass over the data (row {found.row} of batch {found.batch})"
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
                for k in parts:
                    if k not in self._found or float(sizes[k]) > self._found[k].size:
                        self._found[k] = _Found(float(sizes[k]), batch.number, start, batch.start + start)
                return
            middle = (start + stop) // 2
            rows = slice(start, middle)
            left = _sizes(self._measure(self._pullback.part(batch.points, rows), batch.blocks[rows]))
            halve(start, middle, left)
            halve(middle, stop, sizes - left)

        halve(0, len(batch.points), batch.sizes)

    def _measure(self, points: Points, blocks: NodeBlocks) -> Tensor | KronFactors:
        if self._structure is Structure.KRON:
            return self._pullback.kron_factors(points, blocks, self._n_data)
        return self._pullback.block_term(points, blocks, Structure.DIAG)

    def _part_name(self, part: int) -> str:
        if self._structure is not Structure.KRON:
            return ""
        names = []
        for (name, _), count in zip(self._pullback.named_sizes(), self._factors, strict=True):
            layer = name.rpartition(".")[0] or name
            kinds = ["curvature factor", "input factor"] if count == 2 else ["block of a vector"]
            names += [f"{kind} of layer {layer!r}" for kind in kinds]
        return names[part]


def warn_of_point(share: float, point: str, part: str = "") -> None:
    """Warn that one point carries most of a curvature.

    Args:
        share: Of the curvature, or of a part of it.
        point: Which point.
        part: Which part; empty for the whole.
    """
    whole = f"the curvature ({part})" if part else "the curvature"
    msg = (
        f"One point carries {100 * share:.0f} % of {whole}: {point}. The posterior then follows this point alone, and "
        "is too certain of everything else. Look at its input and at the norm of its output; leave it out, or clip it."
    )
    warnings.warn(msg, UserWarning, stacklevel=2)


def _sizes(term: Tensor | KronFactors) -> Tensor:
    """Sum of the absolute diagonal: of the whole, shape (1,), or of every Kronecker factor."""
    if isinstance(term, Tensor):
        return (term if term.ndim == 1 else term.diagonal()).abs().sum().reshape(1)
    return torch.stack([factor.diagonal().abs().sum() for group in term for factor in group])
