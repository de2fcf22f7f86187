"""Triplets that are listed one by one, and the derivatives of a hinge on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contrastive_curvature.hessian.derivatives import CosineDerivatives, NodeSums
from contrastive_curvature.losses.sides import Sides
from contrastive_curvature.pairs.edges import EdgeRelation

if TYPE_CHECKING:
    from contrastive_curvature.losses.triplet_hinge import TripletLoss

__all__ = ["ListedTripletDerivatives", "ListedTriplets", "listed_violations"]


class ListedTriplets(EdgeRelation):
    """Triplets of an anchor, a positive and a negative; one listed twice counts twice.

    Args:
        tuples: Three integer index tensors of shape (K,).
        n: Number of points.
        device: Device of the points.

    Raises:
        InputTypeError: A tensor does not hold integers.
        InputError: The lengths differ, a tensor is not one-dimensional, or an index is outside ``0..n-1``.

    Attributes:
        anchor: Shape (T,), without the triplets whose anchor is its own positive or negative.
        near: The positive of each.
        far: The negative of each.
    """

    def __init__(self, tuples: tuple[Tensor, ...], n: int, device: torch.device) -> None:
        super().__init__(tuples, n, device)
        a, p, far = (part.to(device=device, dtype=torch.int64) for part in tuples)
        apart = (a != p) & (a != far)
        self.anchor, self.near, self.far = a[apart], p[apart], far[apart]


def listed_violations(relation: ListedTriplets, u: Tensor, margin: float) -> Tensor:
    """``2 s_an - 2 s_ap + margin`` of every triplet, shape (T,).

    Args:
        relation: The triplets.
        u: Unit embeddings, shape (N, D).
        margin: In units of squared distance.
    """
    return 2 * (u[relation.anchor] * (u[relation.far] - u[relation.near])).sum(1) + margin


class ListedTripletDerivatives(CosineDerivatives):
    """Pair weights of listed triplets, held whole: they are those of a batch.

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
        self.anchors = int(relation.anchor.unique().numel())
        scale = loss._scale(float(active.sum()), Sides.one_tower(self.n), self.anchors, as_data=as_data)
        self._value = scale * cost[active].double().sum()
        y = u.new_zeros(self.n, self.n)
        weight = u.new_full((int(active.sum()),), 2 * scale)
        for other, sign in ((relation.near, 1), (relation.far, -1)):
            y.index_put_((relation.anchor[active], other[active]), sign * weight, accumulate=True)
        y = y + y.T
        self._y = y.clamp_(min=0) if loss.pd_fix.attracting_only else y

    def node_sums(self) -> NodeSums:
        """See :meth:`CosineDerivatives.node_sums`."""
        return NodeSums(self._y.sum(1), self._y @ self.u, None, self._value)

    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        """See :meth:`CosineDerivatives.rows`."""
        return self._y[start:stop, columns], None
