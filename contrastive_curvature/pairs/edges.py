"""Listed pairs of a batch: a miner's index tuples, and pairs with a direction.

Pairs with a direction name one partner of every anchor, or the share of each candidate in the anchor's target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.pairs.relation import HeldRelation, Relation

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


MOST_POINTS = 2**14
"""Points of a batch whose pairs are listed: as many as two matrices of all pairs hold in a few GiB."""


class EdgeRelation(HeldRelation):
    """Pairs listed by a miner of pytorch-metric-learning; a pair listed twice counts twice.

    ``(a, p, n)`` lists for every triplet the positive pair ``{a, p}`` and the negative pair ``{a, n}``;
    ``(a1, p, a2, n)`` lists the positive pairs ``{a1, p}`` and the negative pairs ``{a2, n}``.

    Args:
        tuples: Three or four integer index tensors.
        n: Number of points, at most :data:`MOST_POINTS`.
        device: Device of the points.
    """

    def __init__(self, tuples: tuple[Tensor, ...], n: int, device: torch.device) -> None:
        tensors = [_indices(tensor, n, device) for tensor in tuples]
        a1, p, a2, neg = (tensors[0], tensors[1], tensors[0], tensors[2]) if len(tensors) == 3 else tensors
        if a1.shape != p.shape or a2.shape != neg.shape:
            lengths = [t.numel() for t in tensors]
            raise InputError("pairs", "index tensors of equal length", f"lengths {lengths}")
        if n > MOST_POINTS:
            hint = "Labels and a callable relate any number of points."
            raise InputError("pairs", f"index tensors of a batch of at most {MOST_POINTS:,} points", n, hint)
        super().__init__(_times_listed(a1, p, n), _times_listed(a2, neg, n))


def _times_listed(a: Tensor, b: Tensor, n: int) -> Tensor:
    """Count how often each pair is listed, in either order, shape (n, n)."""
    listed = torch.bincount((a * n + b)[a != b], minlength=n * n).view(n, n)
    return listed + listed.T


def _indices(tensor: object, n: int, device: torch.device) -> Tensor:
    """Check indices of n points, and return them as int64, shape (K,)."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in _INTEGERS or tensor.layout != torch.strided:
        got = f"dtype {tensor.dtype}, {tensor.layout}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise InputTypeError("pairs", "integer index tensors", got)
    if tensor.ndim != 1:
        raise InputError("pairs", "index tensors of shape (K,)", f"shape {tuple(tensor.shape)}")
    low, high = (int(end) for end in tensor.aminmax()) if tensor.numel() else (0, -1)
    if low < 0 or high >= n:
        raise InputError("pairs", f"indices in 0..{n - 1} for {n} points", f"{low}..{high}")
    return tensor.to(device=device, dtype=torch.int64)


_SUM = 1e-4
"""How far the targets of an anchor may be from one: softmax in half precision is not nearer."""


class TargetMatrix(HeldRelation):
    """Shares of the candidates in the targets of the anchors; a candidate without a share is a negative.

    Args:
        targets: Shape (N, N), not negative, with rows that sum to one; the diagonal is zero.
    """

    def __init__(self, targets: Tensor) -> None:
        if not bool((targets.isfinite() & (targets >= 0)).all()):
            raise InputError("pairs", "targets of finite numbers >= 0", "others")
        if bool(targets.diagonal().any()):
            hint = "A point is no candidate of its own: its diagonal entry is zero."
            raise InputError("pairs", "targets with a zero diagonal", "others", hint)
        wrong = ((targets.sum(1) - 1).abs() > _SUM).nonzero().flatten()[:5].tolist()
        if wrong:
            got = f"{[round(float(targets[row].sum()), 4) for row in wrong]} in rows {wrong}"
            raise InputError("pairs", "targets of an anchor that sum to one", got, "Divide each row by its sum.")
        super().__init__(targets, (targets == 0).fill_diagonal_(False))


def _of_partners(partner: Tensor, n: int) -> TargetMatrix:
    """Return targets where each point has one positive, by index, shape (N,), never the point itself."""
    if n and not bool(((partner >= 0) & (partner < n)).all()):
        got = f"{int(partner.min())}..{int(partner.max())}"
        raise InputError("pairs", f"a partner in 0..{n - 1} for every point", got)
    own = (partner == torch.arange(n, device=partner.device)).nonzero().flatten()[:5].tolist()
    if own:
        raise InputError("pairs", "another point as the partner of every point", f"itself in rows {own}")
    return TargetMatrix(torch.zeros(n, n, device=partner.device).scatter_(1, partner.unsqueeze(1), 1.0))


def make_targets(pairs: Tensor, n: int, device: torch.device) -> Relation:
    """Make the relation from one tensor: the partners' indices, integers (N,), or targets (N, N)."""
    wanted = f"the index of the partner of each of the {n} points, shape ({n},), or targets of shape ({n}, {n})"
    whole = not (pairs.is_floating_point() or pairs.is_complex() or pairs.dtype == torch.bool)
    if (pairs.ndim == 1 and not whole) or (pairs.ndim == 2 and not pairs.is_floating_point()):
        raise InputTypeError("pairs", wanted, f"dtype {pairs.dtype}")
    if tuple(pairs.shape) not in ((n,), (n, n)):
        raise InputError("pairs", wanted, f"shape {tuple(pairs.shape)}")
    return _of_partners(pairs.long().to(device), n) if pairs.ndim == 1 else TargetMatrix(pairs.to(device))
