"""The positive and negative pairs: from class labels, a miner's index tuples, masks or a callable.

This package describes unordered pairs. Embeddings, the margin, weights and normalisation belong to ``losses``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.pairs.edges import EdgeRelation
from contrastive_curvature.pairs.relation import MaskRelation, Relation, RelationFunction, make_target_relation

__all__ = ["Pairs", "Relation", "RelationFunction", "make_relation"]

Pairs = tuple[Tensor, ...] | RelationFunction | Tensor
"""What ``pairs=`` accepts: index tuples ``(a, p, n)`` or ``(a1, p, a2, n)``, boolean masks ``(positive, negative)`` of
shape (N, N), or a callable relation on the targets given as ``labels``. Losses of anchors also take a tensor, see
:mod:`contrastive_curvature.pairs.edges`."""

_WANTED = "index tensors (a, p, n) or (a1, p, a2, n), boolean masks (positive, negative), or a callable"


def make_relation(n: int, device: torch.device, labels: Tensor | None = None, pairs: Pairs | None = None) -> Relation:
    """Build the relation of N points from the user's ``labels`` or ``pairs``.

    Args:
        n: Number of points.
        device: Device of the embeddings; labels and pairs are moved to it.
        labels: Integer class labels (N,); with a callable ``pairs``, any targets of shape (N, ...).
        pairs: Used instead of class labels: index tuples as the miners of pytorch-metric-learning return them (repeated
            pairs add up), two boolean masks (N, N), or ``function(targets_a, targets_b)`` that returns two boolean
            masks (A, B). Without ``labels``, a callable receives the indices of the points as targets.

    Returns:
        The relation.

    Raises:
        InputError: ``labels`` and ``pairs`` are both passed or both missing, or one is malformed; the message names it.
    """
    if pairs is None:
        if labels is None:
            raise InputError("labels", "class labels, or pairs=...", "neither")
        return make_target_relation(labels, n, device)
    if callable(pairs):
        return make_target_relation(torch.arange(n, device="cpu") if labels is None else labels, n, device, pairs)
    if labels is not None:
        raise InputError("labels, pairs", "one of them", "both", "Listed pairs need no labels.")
    if not isinstance(pairs, (tuple, list)):
        raise InputTypeError("pairs", _WANTED, f"a {type(pairs).__name__}")
    if len(pairs) == 2 and all(isinstance(m, Tensor) and m.dtype == torch.bool for m in pairs):
        return MaskRelation(pairs[0].to(device), pairs[1].to(device), n)
    if len(pairs) not in (3, 4):
        raise InputError("pairs", _WANTED, f"a tuple of {len(pairs)}")
    return EdgeRelation(tuple(pairs), n, device)
