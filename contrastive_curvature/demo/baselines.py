"""Uncertainties that need no posterior, which every claim has to stand beside."""

from __future__ import annotations

import torch
from torch import Tensor
from tqdm import tqdm

from contrastive_curvature.demo.config import NEIGHBORS
from contrastive_curvature.gallery import neighbor_distance

__all__ = ["embedding_distance", "feature_distance"]

_BLOCK = 2000


def embedding_distance(queries: Tensor, gallery: Tensor) -> Tensor:
    """Mean cosine distance to the 10 nearest training embeddings, see :func:`neighbor_distance`."""
    return neighbor_distance(queries, gallery, NEIGHBORS)


def feature_distance(queries: Tensor, gallery: Tensor, progress: bool = True) -> Tensor:
    """Mean cosine distance to the 10 nearest training images in the features before the last layer.

    In blocks of queries and of gallery, so that beside the features nothing larger than a block times a block exists.

    Args:
        queries: Features of test images, shape (N, F).
        gallery: Features of training images, shape (M, F), M >= 10.
        progress: Whether to show a progress bar.

    Returns:
        Shape (N,), in [0, 1] for features that are not negative.
    """
    lengths = gallery.norm(dim=1)
    parts = []
    for rows in tqdm(queries.split(_BLOCK), desc="[feature baseline]", leave=False, disable=not progress):
        unit = rows / rows.norm(dim=1, keepdim=True)
        best = unit.new_full((len(rows), NEIGHBORS), -1.0)
        for start in range(0, len(gallery), _BLOCK):
            block = slice(start, start + _BLOCK)
            cosine = unit @ gallery[block].T / lengths[block]
            best = torch.cat([best, cosine], dim=1).topk(NEIGHBORS, dim=1).values
        parts.append(1 - best.mean(1))
    return torch.cat(parts)
