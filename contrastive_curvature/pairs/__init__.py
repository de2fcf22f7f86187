"""Labels, miner tuples or a relation -> the symmetric pair weights ``Y``.

The only place that knows ordered from unordered pairs, the margin, the negative weight and the normalisation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.pairs.edges import EdgeRelation
from contrastive_curvature.pairs.relation import MaskRelation, Relation, RelationFunction, make_target_relation

__all__ = ["Pairs", "Relation", "RelationFunction", "make_relation"]

Pairs = tuple[Tensor, ...] | RelationFunction
"""What ``pairs=`` accepts: index tuples ``(a, p, n)`` or ``(a1, p, a2, n)``, boolean masks ``(positive, negative)`` of
shape (N, N), or a callable relation on the targets given as ``labels``."""

_WANTED = "index tensors (a, p, n) or (a1, p, a2, n), boolean masks (positive, negative), or a callable"


def make_relation(n: int, device: torch.device, labels: Tensor | None = None, pairs: Pairs | None = None) -> Relation:
    """Build the relation of N points from what the user has.

    Args:
        n: Number of points.
        device: Where the embeddings live; everything is brought there.
        labels: Integer class labels (N,); with a callable ``pairs``, any targets of shape (N, ...).
        pairs: Instead of class labels: index tuples as the miners of pytorch-metric-learning return them (repeated
            pairs add up), two boolean masks (N, N), or ``function(targets_a, targets_b)`` that returns two boolean
            masks (A, B). A callable without ``labels`` is given the indices of the points.

    Returns:
        The relation.

    Raises:
        InputError: Neither or both are given, or one is malformed; the message says which.
    """
    if pairs is None:
        if labels is None:
            raise InputError(expected("labels", "class labels, or pairs=...", "neither"))
        return make_target_relation(labels, n, device)
    if callable(pairs):
        return make_target_relation(torch.arange(n) if labels is None else labels, n, device, pairs)
    if labels is not None:
        raise InputError(expected("labels, pairs", "one of them", "both", "Listed pairs need no labels."))
    if not isinstance(pairs, (tuple, list)):
        raise InputTypeError(expected("pairs", _WANTED, f"a {type(pairs).__name__}"))
    if len(pairs) == 2 and all(isinstance(m, Tensor) and m.dtype == torch.bool for m in pairs):
        return MaskRelation(pairs[0].to(device), pairs[1].to(device), n)
    if len(pairs) not in (3, 4):
        raise InputError(expected("pairs", _WANTED, f"a tuple of {len(pairs)}"))
    return EdgeRelation(tuple(pairs), n, device)
