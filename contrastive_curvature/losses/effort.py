"""How long the pairs of a data set will take, measured on a few of them before all are formed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.pairs.edges import EdgeRelation
from contrastive_curvature.pairs.relation import BLOCK_ELEMENTS, LabelRelation, Relation

__all__ = ["FASTER", "FEWEST_POINTS", "block_seconds", "drawn", "labelled_seconds", "moment_seconds", "seconds"]

FASTER = "Faster: fewer points; margin=None, which needs sums over classes only (with class labels); or a GPU."
"""Advice to who asks for the pairs of points that are there at once."""

FEWEST_POINTS = 30_000
"""Fewer points have pairs that any machine is through with in seconds."""

FEWEST_PRODUCTS = 10**11
"""Fewer products of numbers take seconds on any machine."""

_ROUNDS = 3
"""How often a relation is formed over all pairs: counts, shares, sums."""


def block_seconds(relation: Relation, u: Tensor) -> float:
    """Estimate how long forming all pairs will take.

    Args:
        relation: Which pairs are positive and negative.
        u: Unit embeddings, shape (N, D).

    Returns:
        Seconds; zero where the pairs are listed or few.
    """
    n = relation.n
    if n < FEWEST_POINTS or isinstance(relation, EdgeRelation):
        return 0.0
    height = max(1, min(n, BLOCK_ELEMENTS // n))

    def block() -> None:
        relation.rows(0, height)
        u[:height] @ u.T

    return _ROUNDS * seconds(block, u) * n / height


def labelled_seconds(n: int, like: Tensor) -> float:
    """The same for class labels, before there are embeddings.

    Args:
        n: Number N of points to come.
        like: A tensor of the embeddings' type and device, shape (..., D).
    """
    if n < FEWEST_POINTS:
        return 0.0
    few = 2048
    u = drawn(few, like)
    return block_seconds_of(LabelRelation(torch.arange(few, device=u.device) % 100), u) * (n / few) ** 2


def block_seconds_of(relation: Relation, u: Tensor) -> float:
    """How long all pairs of a few points take, however few they are."""

    def block() -> None:
        relation.rows(0, relation.n)
        u @ u.T

    return _ROUNDS * seconds(block, u)


def moment_seconds(n: int, like: Tensor) -> float:
    """Estimate how long a loss with a second derivative takes for its sums ``sum_j c_ij u_j u_j^T`` over all pairs.

    Args:
        n: Number N of points.
        like: A tensor of the embeddings' type and device, shape (..., D).

    Returns:
        Seconds; zero where they are few.
    """
    dim = like.shape[-1]
    if (n * dim) ** 2 < FEWEST_PRODUCTS:
        return 0.0
    height, width = max(1, BLOCK_ELEMENTS // n), max(1, min(n, BLOCK_ELEMENTS // dim**2))
    u = drawn(width, like)
    weights, out = u.new_ones(height, width), u.new_zeros(height, dim * dim)

    def block() -> None:
        out.addmm_(weights, (u.unsqueeze(2) * u.unsqueeze(1)).flatten(1))

    return seconds(block, u) * (n / height) * (n / width)


def drawn(count: int, like: Tensor) -> Tensor:
    """Random unit vectors, shape (count, D), of the type, device and D of ``like``."""
    generator = torch.Generator().manual_seed(0)
    return normalize(torch.randn(count, like.shape[-1], generator=generator).to(like))[0]


def seconds(run: Callable[[], None], like: Tensor) -> float:
    """Of the faster of two runs, the first of which may have to warm up."""
    taken = []
    for _ in range(2):
        start = time.perf_counter()
        run()
        if like.is_cuda:
            torch.cuda.synchronize(like.device)
        taken.append(time.perf_counter() - start)
    return min(taken)
