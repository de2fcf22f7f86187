"""Positives that have a direction: one partner of every anchor, or how much each candidate is its target."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.pairs.relation import Relation

_SUM = 1e-4
"""How far the targets of an anchor may be from one: softmax in half precision is not nearer."""


class PartnerRelation(Relation):
    """One positive a point, by its index; all others are negatives.

    Args:
        partner: Index of the positive of every point, shape (N,); no point is its own.
    """

    def __init__(self, partner: Tensor) -> None:
        self.n, self.device = len(partner), partner.device
        self.partner = partner.long()
        if self.n and not bool(((self.partner >= 0) & (self.partner < self.n)).all()):
            came = f"{int(self.partner.min())}..{int(self.partner.max())}"
            raise InputError("pairs", f"a partner in 0..{self.n - 1} for every point", came)
        own = (self.partner == torch.arange(self.n, device=self.device)).nonzero().flatten()[:5].tolist()
        if own:
            raise InputError("pairs", "another point as the partner of every point", f"itself in rows {own}")

    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """See :meth:`Relation.rows`; rows are anchors."""
        candidates = torch.arange(self.n, device=self.device)[columns]
        anchors = torch.arange(start, stop, device=self.device).unsqueeze(1)
        positive = self.partner[start:stop].unsqueeze(1) == candidates
        return positive, ~positive & (candidates != anchors)


class TargetMatrix(Relation):
    """Shares of the candidates in the targets of the anchors; a candidate without a share is a negative.

    Args:
        targets: Shape (N, N), not negative, with rows that sum to one; the diagonal is zero.
    """

    def __init__(self, targets: Tensor) -> None:
        self.n, self.device, self.targets = len(targets), targets.device, targets
        if not bool((targets.isfinite() & (targets >= 0)).all()):
            raise InputError("pairs", "targets of finite numbers >= 0", "others")
        if bool(targets.diagonal().any()):
            hint = "A point is no candidate of its own: its diagonal entry is zero."
            raise InputError("pairs", "targets with a zero diagonal", "others", hint)
        wrong = ((targets.sum(1) - 1).abs() > _SUM).nonzero().flatten()[:5].tolist()
        if wrong:
            came = f"{[round(float(targets[row].sum()), 4) for row in wrong]} in rows {wrong}"
            raise InputError("pairs", "targets of an anchor that sum to one", came, "Divide each row by its sum.")

    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """See :meth:`Relation.rows`; rows are anchors."""
        positive = self.targets[start:stop, columns]
        candidates = torch.arange(self.n, device=self.device)[columns]
        anchors = torch.arange(start, stop, device=self.device).unsqueeze(1)
        return positive, (positive == 0) & (candidates != anchors)


def make_targets(pairs: Tensor, n: int, device: torch.device) -> Relation:
    """Return the relation of a single tensor: partners, whole numbers (N,), or targets (N, N)."""
    wanted = f"the index of the partner of each of the {n} points, shape ({n},), or targets of shape ({n}, {n})"
    whole = not (pairs.is_floating_point() or pairs.is_complex() or pairs.dtype == torch.bool)
    if (pairs.ndim == 1 and not whole) or (pairs.ndim == 2 and not pairs.is_floating_point()):
        raise InputTypeError("pairs", wanted, f"dtype {pairs.dtype}")
    if tuple(pairs.shape) not in ((n,), (n, n)):
        raise InputError("pairs", wanted, f"shape {tuple(pairs.shape)}")
    return PartnerRelation(pairs.to(device)) if pairs.ndim == 1 else TargetMatrix(pairs.to(device))
