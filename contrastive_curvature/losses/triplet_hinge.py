"""The triplet loss with a margin."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature import validate
from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.derivatives import CosineDerivatives, NodeSums
from contrastive_curvature.losses.row_loss import RowLoss, RowTerms
from contrastive_curvature.losses.sides import Sides, one_tower
from contrastive_curvature.options import Distance, PDFix
from contrastive_curvature.pairs import Pairs
from contrastive_curvature.pairs.edges import EdgeRelation
from contrastive_curvature.pairs.relation import Relation

_MOST_PAIRS = 2**24
"""Anchors times candidates of the largest batch whose derivatives are formed."""


class TripletLoss(RowLoss):
    r"""Triplet loss with a hinge on squared distances of unit embeddings.

    Over all triplets of an anchor i, one of its positives p and one of its negatives n:

    .. math::
        \max(0, |u_i - u_p|^2 - |u_i - u_n|^2 + m) = \max(0, 2 s_{in} - 2 s_{ip} + m)

    With ``reduction="mean"`` the loss is the mean over the active triplets, whose hinge is above zero; with ``"sum"``
    their sum. A positive that counts k times and a negative that counts l times make k l triplets. Anchors without a
    positive or without a negative have no triplet and are left out.

    Index tensors ``pairs=(a, p, n)`` list the triplets themselves, and no other triplets of the same points are formed;
    a triplet with the anchor as its own positive or negative is left out. Four tensors ``(a1, p, a2, n)`` list
    unordered pairs, like masks, and all their triplets are formed.

    The loss is piecewise linear in the cosines, so its second-order part is zero.

    The same loss elsewhere: ``TripletMarginLoss(margin, distance=LpDistance(power=2))`` of pytorch-metric-learning,
    with its default reducer and without ``swap``. Its default distance is not squared, and neither is the distance of
    ``torch.nn.TripletMarginLoss``: these are other losses.

    Args:
        margin: ``m``, in units of squared distance (which is at most 4), not negative.
        reduction: See above.
        directions: See :class:`~contrastive_curvature.losses.row_loss.RowLoss`.
        distance: See :class:`~contrastive_curvature.options.Distance`; not the distance in the hinge.
        pd_fix: See :class:`~contrastive_curvature.options.PDFix`; ``"ggn"`` is refused, since it is zero.

    Raises:
        InputError: An option is unknown or out of range.
        UnsupportedError: ``pd_fix="ggn"``; or derivatives of more than 2^24 pairs of an anchor and a candidate.

    Source: Schroff et al., FaceNet: A Unified Embedding for Face Recognition and Clustering, 2015, section 3.1. Hermans
    et al., In Defense of the Triplet Loss for Person Re-Identification, 2017, average over active triplets.
    """

    linear = True

    def __init__(
        self,
        margin: float | Tensor = 0.2,
        reduction: str = "mean",
        directions: str = "both",
        *,
        distance: Distance | str = Distance.ARCCOS,
        pd_fix: PDFix | str = PDFix.PSD_PARTS,
    ) -> None:
        super().__init__(reduction, directions, distance=distance, pd_fix=pd_fix)
        self.margin = validate.hyperparameter("margin", margin)

    @override
    def relate(self, z: Tensor, labels: Tensor | None, pairs: Pairs | None) -> Relation:
        if isinstance(pairs, tuple) and len(pairs) == 3:
            return ListedTriplets(pairs, len(z), z.device)
        return super().relate(z, labels, pairs)

    @override
    def derivatives(
        self, relation: Relation, u: Tensor, *, sides: Sides | None = None, as_data: bool = False
    ) -> CosineDerivatives:
        for side in sides or one_tower(len(u)):
            anchors, candidates = side.shape
            if anchors * candidates > _MOST_PAIRS:
                raise UnsupportedError(
                    f"TripletLoss: triplets are those of a batch, and its derivatives for {anchors} anchors with "
                    f"{candidates} candidates each are not formed (at most {_MOST_PAIRS} pairs). Use smaller batches."
                )
        if isinstance(relation, ListedTriplets):
            return ListedTripletDerivatives(self, relation, u, as_data=as_data)
        return super().derivatives(relation, u, sides=sides, as_data=as_data)

    def _value_of(self, u: Tensor, relation: Relation, sides: Sides) -> Tensor:
        if not isinstance(relation, ListedTriplets):
            return super()._value_of(u, relation, sides)
        cost = listed_violations(relation, u, self.margin).relu()
        scale = self._scale((cost > 0).sum().double(), sides)
        return (scale * cost.double().sum()).to(u.dtype) + 0 * u.sum()

    def _counts(self, positive: Tensor, negative: Tensor) -> Tensor:
        return positive.sum(1) * negative.sum(1)

    def _counts_at(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return self._active(cosine, positive, self._statistics(cosine, positive, negative))[0]

    def _value(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        # The loss is linear in the cosines while the same triplets are active.
        fixed = cosine.detach()
        statistics = self._statistics(fixed, positive, negative)
        first = self._terms(fixed, positive, negative, statistics).first
        return (first * cosine).sum(1) + self.margin * self._active(fixed, positive, statistics)[0]

    def _statistics(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        # Both ends of a triplet use the positive's threshold, so that rounding cannot make only one end active.
        return torch.cat([*_sorted(cosine - self.margin / 2, positive), *_sorted(cosine, negative)], dim=1)

    def _terms(self, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor) -> RowTerms:
        thresholds, weights, _, _ = _parts(statistics)
        below = torch.searchsorted(thresholds.contiguous(), cosine.contiguous())
        of_negative = weights.gather(1, below)
        of_positive = self._active(cosine, positive, statistics)[1]
        return RowTerms(2 * (negative * of_negative - positive * of_positive), None)

    def _active(self, cosine: Tensor, positive: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Count the active triplets of every anchor, (B,), and of every candidate as a positive that counts once."""
        _, _, cosines, weights = _parts(statistics)
        up_to = torch.searchsorted(cosines.contiguous(), (cosine - self.margin / 2).contiguous(), right=True)
        each = weights[:, -1:] - weights.gather(1, up_to)
        return (positive * each).sum(1), each


def _sorted(numbers: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the numbers that count, padded with infinity (B, M), and count the numbers before each (B, M + 1)."""
    ordered, order = torch.where(times > 0, numbers, torch.inf).sort(dim=1)
    counted = times.gather(1, order).cumsum(1)
    return ordered, torch.cat([torch.zeros_like(counted[:, :1]), counted], dim=1)


def _parts(statistics: Tensor) -> tuple[Tensor, ...]:
    """Split the statistics into the sorted numbers and the counts of the positives, then of the negatives."""
    many = (statistics.shape[1] - 2) // 4
    return statistics.split([many, many + 1, many, many + 1], dim=1)


class ListedTriplets(EdgeRelation):
    """Triplets of an anchor, a positive and a negative; a triplet listed twice counts twice.

    Args:
        tuples: Three integer index tensors of shape (K,).
        n: Number of points.
        device: Device of the points.

    Raises:
        InputTypeError: A tensor does not hold integers.
        InputError: The lengths differ, a tensor is not one-dimensional, or an index is outside ``0..n-1``.

    Attributes:
        anchor: Anchors, shape (T,), without triplets whose anchor is its own positive or negative.
        near: Positives, shape (T,).
        far: Negatives, shape (T,).
    """

    def __init__(self, tuples: tuple[Tensor, ...], n: int, device: torch.device) -> None:
        super().__init__(tuples, n, device)
        a, p, far = (part.to(device=device, dtype=torch.int64) for part in tuples)
        apart = (a != p) & (a != far)
        self.anchor, self.near, self.far = a[apart], p[apart], far[apart]


def listed_violations(relation: ListedTriplets, u: Tensor, margin: float | Tensor) -> Tensor:
    """Return ``2 s_an - 2 s_ap + margin`` of every triplet, shape (T,), for unit embeddings (N, D)."""
    return 2 * (u[relation.anchor] * (u[relation.far] - u[relation.near])).sum(1) + margin


class ListedTripletDerivatives(CosineDerivatives):
    """Pair weights of listed triplets, stored whole, since the triplets come from one batch.

    Args:
        loss: The loss.
        relation: The triplets.
        u: Unit embeddings, shape (N, D).
        as_data: See :meth:`RowLoss.derivatives`.
    """

    def __init__(self, loss: TripletLoss, relation: ListedTriplets, u: Tensor, *, as_data: bool = False) -> None:
        self.u, self.n = u, len(u)
        cost = listed_violations(relation, u, loss.margin)
        active = cost > 0
        self.anchors = u.new_zeros(self.n, dtype=torch.bool).index_fill_(0, relation.anchor, True).sum()
        scale = loss._scale(active.sum().double(), one_tower(self.n), self.anchors if as_data else None)
        self._value = scale * cost.relu().double().sum()
        y, weight = u.new_zeros(self.n, self.n), (2 * scale * active).to(u.dtype)
        for other, sign in ((relation.near, 1), (relation.far, -1)):
            y.index_put_((relation.anchor, other), sign * weight, accumulate=True)
        y = y + y.T
        self._y = y.clamp_(min=0) if loss.pd_fix.attracting_only else y

    @override
    def node_sums(self) -> NodeSums:
        return NodeSums(self._y.sum(1), self._y @ self.u, None, self._value)

    @override
    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        return self._y[start:stop, columns], None
