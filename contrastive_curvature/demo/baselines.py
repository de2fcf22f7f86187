"""Uncertainties that need no posterior, which every claim has to stand beside."""

from __future__ import annotations

import torch
from torch import Tensor
from tqdm import tqdm

from contrastive_curvature import metrics
from contrastive_curvature.demo.config import NEIGHBORS
from contrastive_curvature.sphere import normalize

__all__ = ["embedding_distance", "feature_distance"]

_BLOCK = 2000


def embedding_distance(queries: Tensor, gallery: Tensor) -> Tensor:
    """Mean cosine distance to the 10 nearest training embeddings.

    For unit embeddings that is half the mean squared Euclidean distance, so the two rank alike.

    Args:
        queries: Raw outputs of test images, shape (N, D).
        gallery: Raw outputs of training images, shape (M, D).

    Returns:
        Shape (N,), in [0, 2].
    """
    u, v = normalize(queries)[0], normalize(gallery)[0]
    found = metrics.nearest_neighbors(u, v, k=NEIGHBORS)
    # From differences, not as 1 - cosine: close neighbours would cancel in float32.
    return (u.unsqueeze(1) - v[found]).square().sum(2).mean(1) / 2


def feature_distance(queries: Tensor, gallery: Tensor) -> Tensor:
    """Mean cosine distance to the 10 nearest training images in the features before the last layer.

    In blocks of queries and of gallery, so that beside the features nothing larger than a block times a block exists.

    Args:
        queries: Features of test images, shape (N, F).
        gallery: Features of training images, shape (M, F), M >= 10.

    Returns:
        Shape (N,), in [0, 1] for features that are not negative.
    """
    lengths = gallery.norm(dim=1)
    parts = []
    for rows in tqdm(queries.split(_BLOCK), desc="[feature baseline]", leave=False):
        unit = rows / rows.norm(dim=1, keepdim=True)
        best = unit.new_full((len(rows), NEIGHBORS), -1.0)
        for start in range(0, len(gallery), _BLOCK):
            block = slice(start, start + _BLOCK)
            cosine = unit @ gallery[block].T / lengths[block]
            best = torch.cat([best, cosine], dim=1).topk(NEIGHBORS, dim=1).values
        parts.append(1 - best.mean(1))
    return torch.cat(parts)
