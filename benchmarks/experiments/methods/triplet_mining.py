"""The triplets of a batch that a triplet loss is taken over."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.pairs import RelationFunction
from contrastive_curvature.pairs.relation import make_target_relation

__all__ = ["mine_triplets", "squared_distances"]


def squared_distances(z: Tensor) -> Tensor:
    """Squared Euclidean distances between all points of a batch.

    From differences, not from inner products, which cancel for close points.

    Args:
        z: Shape (B, D).

    Returns:
        Shape (B, B).
    """
    return (z.unsqueeze(1) - z).square().sum(2)


def mine_triplets(
    z: Tensor,
    targets: Tensor,
    margin: float | None,
    negatives: int | None,
    relation: RelationFunction | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Triplets of a batch: every ordered positive pair, with some of the negatives of its anchor.

    Args:
        z: Points, shape (B, D); no gradient flows through the choice.
        targets: Class labels, shape (B,), or what ``relation`` takes, shape (B, ...).
        margin: Only negatives that violate it, ``|a - n|^2 < |a - p|^2 + margin``, count; ``None``: all of them.
        negatives: Negatives that are drawn at random for each pair, at most; ``None`` for all.
        relation: ``None`` for class labels, or a callable on targets that returns two boolean masks.

    Returns:
        Indices of anchors, positives and negatives, each int64 of shape (T,). Random numbers come from torch's global
        generator of the CPU.
    """
    with torch.no_grad():
        positive, negative = make_target_relation(targets, len(z), z.device, relation).rows(0, len(z))
        anchors, positives = positive.nonzero().unbind(1)
        counts = negative[anchors].bool()
        if margin is not None:
            distances = squared_distances(z)
            counts &= distances[anchors] < distances[anchors, positives].unsqueeze(1) + margin
        if negatives is not None and negatives < counts.shape[1]:
            # The largest of independent uniform numbers are a random subset; those of other points are below them all.
            keys = torch.rand(counts.shape).to(z.device).masked_fill(~counts, -1)
            chosen = torch.zeros_like(counts).scatter_(1, keys.topk(negatives, dim=1).indices, True)
            counts &= chosen
        pairs, thirds = counts.nonzero().unbind(1)
    return anchors[pairs], positives[pairs], thirds
