"""Positives that have a direction: one partner of every anchor, or how much each candidate is its target."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.pairs.relation import HeldRelation, Relation

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
            came = f"{[round(float(targets[row].sum()), 4) for row in wrong]} in rows {wrong}"
            raise InputError("pairs", "targets of an anchor that sum to one", came, "Divide each row by its sum.")
        super().__init__(targets, (targets == 0).fill_diagonal_(False))


def of_partners(partner: Tensor) -> TargetMatrix:
    """Return targets of one positive a point, by its index, shape (N,); no point is its own."""
    n = len(partner)
    if n and not bool(((partner >= 0) & (partner < n)).all()):
        came = f"{int(partner.min())}..{int(partner.max())}"
        raise InputError("pairs", f"a partner in 0..{n - 1} for every point", came)
    own = (partner == torch.arange(n, device=partner.device)).nonzero().flatten()[:5].tolist()
    if own:
        raise InputError("pairs", "another point as the partner of every point", f"itself in rows {own}")
    return TargetMatrix(torch.zeros(n, n, device=partner.device).scatter_(1, partner.unsqueeze(1), 1.0))


def make_targets(pairs: Tensor, n: int, device: torch.device) -> Relation:
    """Return the relation of a single tensor: partners, whole numbers (N,), or targets (N, N)."""
    wanted = f"the index of the partner of each of the {n} points, shape ({n},), or targets of shape ({n}, {n})"
    whole = not (pairs.is_floating_point() or pairs.is_complex() or pairs.dtype == torch.bool)
    if (pairs.ndim == 1 and not whole) or (pairs.ndim == 2 and not pairs.is_floating_point()):
        raise InputTypeError("pairs", wanted, f"dtype {pairs.dtype}")
    if tuple(pairs.shape) not in ((n,), (n, n)):
        raise InputError("pairs", wanted, f"shape {tuple(pairs.shape)}")
    return of_partners(pairs.long().to(device)) if pairs.ndim == 1 else TargetMatrix(pairs.to(device))
