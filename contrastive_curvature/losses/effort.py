"""How long the pairs of a data set will take, measured on a few of them before all are formed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses.label_sums import TILE_COLUMNS, TILE_ROWS, add_inside
from contrastive_curvature.losses.weighting import PairFactors
from contrastive_curvature.options import CurvatureOptions
from contrastive_curvature.pairs.edges import EdgeRelation
from contrastive_curvature.pairs.relation import BLOCK_ELEMENTS, LabelRelation, Relation
from contrastive_curvature.progress import Progress

__all__ = ["FASTER", "announce_labelled", "announce_pairs", "pair_seconds"]

FASTER = "Faster: fewer points; margin=None, which needs sums over classes only (with class labels); or a GPU."
"""Advice to who asks for the pairs of points that are there at once."""

_FEWEST_POINTS = 30_000
"""Fewer points have pairs that any machine is through with in seconds."""

_ROUNDS = 3
"""How often a relation without class labels is formed over all pairs: counts, shares, sums."""


def announce_pairs(relation: Relation, u: Tensor, options: CurvatureOptions, progress: Progress) -> None:
    """Warn where forming the pairs will take more than a minute, before any is formed.

    Args:
        relation: Which pairs are positive and negative.
        u: Unit embeddings, shape (N, D).
        options: The curvature options.
        progress: Of the computation, with its advice.
    """
    n = relation.n
    progress.expect(pair_seconds(relation, u, options), f"Forming the {n * (n - 1) // 2:.3g} pairs of {n} points")


def pair_seconds(relation: Relation, u: Tensor, options: CurvatureOptions) -> float:
    """Estimate how long forming all pairs will take; arguments as in :func:`announce_pairs`.

    Returns:
        Seconds; zero where the pairs are listed, few, or need not be formed.
    """
    n = relation.n
    if n < _FEWEST_POINTS or isinstance(relation, EdgeRelation):
        return 0.0
    factors = PairFactors.from_options(options)
    if isinstance(relation, LabelRelation):
        return _label_seconds(n, u[:TILE_COLUMNS], factors)
    height = max(1, min(n, BLOCK_ELEMENTS // n))

    def block() -> None:
        relation.rows(0, height)
        u[:height] @ u.T

    return _ROUNDS * _seconds(block, u) * n / height


def announce_labelled(n: int, like: Tensor, options: CurvatureOptions, progress: Progress) -> None:
    """The same as :func:`announce_pairs` for class labels, before there are embeddings.

    Args:
        n: Number N of points to come.
        like: A tensor of the embeddings' type and device, shape (..., D).
        options: The curvature options.
        progress: Of the computation, with its advice.
    """
    if n < _FEWEST_POINTS:
        return
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(TILE_COLUMNS, like.shape[-1], generator=generator).to(like)
    seconds = _label_seconds(n, normalize(drawn)[0], PairFactors.from_options(options))
    progress.expect(seconds, f"Forming the {n * (n - 1) // 2:.3g} pairs of {n} points")


def _label_seconds(n: int, columns: Tensor, factors: PairFactors) -> float:
    if factors.cosine is None or not factors.negative:
        return 0.0
    rows = columns[:TILE_ROWS]
    out = rows.new_zeros(rows.shape[0], columns.shape[1] + 1, dtype=torch.float64)
    values = torch.cat([torch.ones_like(columns[:, :1]), columns], dim=1)

    def one() -> None:
        add_inside(out, rows, columns, float(factors.cosine or 0), values)

    return _seconds(one, columns) * (n / rows.shape[0]) * (n / columns.shape[0])


def _seconds(run: Callable[[], None], like: Tensor) -> float:
    """Of the faster of two runs, the first of which may have to warm up."""
    taken = []
    for _ in range(2):
        start = time.perf_counter()
        run()
        if like.is_cuda:
            torch.cuda.synchronize(like.device)
        taken.append(time.perf_counter() - start)
    return min(taken)
