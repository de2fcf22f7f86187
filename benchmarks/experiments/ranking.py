"""Who is retrieved for each query, and who is right: by class labels or by positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.experiments.data import RetrievalData
from benchmarks.experiments.methods.scores import NEIGHBORS
from contrastive_curvature import metrics
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.metrics import Ranking
from contrastive_curvature.metrics.neighbors import Metric

_BLOCK = 256
"""Queries that are held against the whole gallery at a time."""


@dataclass(frozen=True)
class Retrieval:
    """What was retrieved from the gallery, or leave-one-out among the queries.

    Args:
        ranking: Right and wrong neighbours.
        nearest: Index of the first one, int64, shape (N,).
    """

    ranking: Ranking
    nearest: Tensor


def retrieve(data: RetrievalData, queries: Tensor, gallery: Tensor | None, metric: Metric = "cosine") -> Retrieval:
    """Find the ten nearest neighbours, and tell the right ones.

    Args:
        data: Targets of queries and gallery; with positions, its relevance (or else its relation) decides.
        queries: Embeddings, shape (N, D).
        gallery: Embeddings, shape (M, D), or ``None`` for leave-one-out.
        metric: What is near, ``"cosine"`` or ``"euclidean"``.

    Returns:
        The neighbours.

    Raises:
        InputError: One of gallery embeddings and gallery images is missing.
    """
    if (gallery is None) != (data.gallery is None):
        raise InputError(
            expected("gallery", "embeddings of the data's gallery, if it has one", "one without the other")
        )
    found = metrics.nearest_neighbors(queries, gallery, k=NEIGHBORS, metric=metric)
    same = data.relevance or data.relation
    if same is None:
        held = None if data.gallery is None else data.gallery.targets
        return Retrieval(metrics.rank_by_labels(found, data.test.targets, held), found[:, 0])
    targets = data.test.targets
    held = targets if data.gallery is None else data.gallery.targets
    relevant, counts = [], []
    for rows in torch.arange(len(targets)).split(_BLOCK):
        right = same(targets[rows], held)[0]
        if data.gallery is None:
            right[torch.arange(len(rows)), rows] = False
        relevant.append(right.gather(1, found[rows]))
        counts.append(right.sum(1))
    return Retrieval(Ranking(torch.cat(relevant), torch.cat(counts)), found[:, 0])
