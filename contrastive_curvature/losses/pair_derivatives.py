"""The derivatives of any pair loss in the cosines, never held whole: rows are made in blocks and used up."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from contrastive_curvature.hessian.derivatives import DatasetDerivatives, NodeSums, Totals
from contrastive_curvature.hessian.moments import MomentPart, PairMoments
from contrastive_curvature.losses.weighting import ClassShares, Shares, count_shares, pair_totals, weigh_pairs
from contrastive_curvature.options import PDFix
from contrastive_curvature.pairs.relation import LabelRelation, Relation, TargetRelation, row_ranges
from contrastive_curvature.progress import LongRunWarning

if TYPE_CHECKING:
    from contrastive_curvature.losses.base import PairLoss


_MANY_PRODUCTS = 10**12
"""Products of numbers that take minutes on one core."""

_Block = tuple[Tensor, Tensor | None, Tensor]
"""``y``, ``c`` and the value of a block of pairs."""


class PairDerivatives(DatasetDerivatives):
    """``y`` and ``c`` (N, N) of a pair loss: symmetric, with a zero diagonal.

    Args:
        loss: The loss; with its ``positive`` fix ``y`` keeps the positive pairs only (Eq. 109), with ``ggn`` none.
        relation: Which pairs are positive and negative.
        u: Unit embeddings, shape (N, D).
        shares: Of the points; ``None`` counts the pairs of ``relation``.
    """

    def __init__(self, loss: PairLoss, relation: Relation, u: Tensor, shares: Shares | None = None) -> None:
        self.loss, self.relation, self.u = loss, relation, u
        self.n = self.anchors = relation.n
        counts = relation.counts()
        self.totals = pair_totals(*counts)
        self.shares = shares or count_shares(*counts, loss.normalization, u.dtype, self.totals)
        self._class_shares: ClassShares | None = None
        if len(u) ** 2 * u.shape[1] >= _MANY_PRODUCTS and self.forms_pairs():
            warnings.warn(
                f"Forming the {self.n * (self.n - 1) / 2:.3g} pairs of {self.n} points takes a time of order N^2. "
                "Faster: fewer points; margin=None, which needs sums over classes only (with class labels); or a GPU.",
                LongRunWarning,
                stacklevel=2,
            )

    def forms_pairs(self) -> bool:
        """Return whether the sums of the points need all their pairs."""
        return True

    def node_sums(self) -> NodeSums:
        """See :meth:`CosineDerivatives.node_sums`."""
        return self._sums(self.n, lambda start, stop, value: self._rows(start, stop, value=value))

    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        """See :meth:`CosineDerivatives.rows`."""
        return self._rows(start, stop, columns)[:2]

    def second_matmul(self, t: Tensor) -> Tensor | None:
        """See :meth:`CosineDerivatives.second_matmul`."""
        if self.loss.linear:
            # Before any block of pairs is formed: every product with a Hessian asks.
            return None
        return super().second_matmul(t)

    def sums_for(self, u: Tensor, targets: Tensor) -> NodeSums:
        """See :meth:`DatasetDerivatives.sums_for`."""
        relation, shares = self._target_relation(), self.shares_for(targets)

        def block(start: int, stop: int, value: bool) -> _Block:
            rows = slice(start, stop)
            masks, cosine = relation.relate(targets[rows], relation.targets), u[rows] @ self.u.T
            for mask, related in zip(masks, relation.self_relation(targets[rows]), strict=True):
                points = related.nonzero().squeeze(1)
                if len(points):
                    # A point itself is the closest to it, or equal to the closest.
                    mask[points, cosine[points].masked_fill(~mask[points], -torch.inf).argmax(1)] = False
            # No rule of a loss sees a point with itself, where derivatives may be infinite.
            cosine.masked_fill_(~(masks[0] | masks[1]), 0)
            return self._block(*masks, cosine, shares[rows], self.shares, value)

        return self._sums(len(u), block)

    def between(
        self, u_a: Tensor, targets_a: Tensor, u_b: Tensor, targets_b: Tensor, itself: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """See :meth:`DatasetDerivatives.between`."""
        positive, negative = self._target_relation().relate(targets_a, targets_b)
        cosine = (u_a @ u_b.T).masked_fill(itself, 0)
        shares = self.shares_for(targets_a), self.shares_for(targets_b)
        return self._block(positive & ~itself, negative & ~itself, cosine, *shares)[:2]

    def places(self, u: Tensor, targets: Tensor) -> Tensor:
        """See :meth:`DatasetDerivatives.places`."""
        mine, theirs = (given.unsqueeze(1).flatten(1) for given in (targets, self._target_relation().targets))
        out = torch.zeros(len(u), dtype=torch.int64, device=u.device)
        for rows in row_ranges(len(u), theirs.numel()):
            other = (mine[rows].unsqueeze(1) != theirs).any(2)
            out[rows] = (u[rows] @ self.u.T).masked_fill(other, -torch.inf).argmax(1)
        return out

    def among(self, u: Tensor, targets: Tensor) -> PairDerivatives:
        """See :meth:`DatasetDerivatives.among`."""
        relation = self._target_relation().of(targets)
        shares = self.shares_for(targets).standing_for(self.totals, pair_totals(*relation.counts()))
        return self.loss.derivatives(relation, u, shares=shares)

    def shares_for(self, targets: Tensor) -> Shares:
        """Return the shares of points of this set, recognised by their targets."""
        relation = self._target_relation()
        if isinstance(relation, LabelRelation):
            if self._class_shares is None:
                self._class_shares = ClassShares(relation.targets, self.shares)
            return self._class_shares.of(targets)
        itself = relation.self_relation(targets)
        counts = [
            torch.stack([mask.sum(1) for mask in relation.relate(targets[rows], relation.targets)])
            for rows in row_ranges(len(targets), self.n)
        ]
        positive, negative = torch.cat(counts, dim=1) - torch.stack(itself).long()
        return count_shares(positive, negative, self.loss.normalization, self.u.dtype, self.totals)

    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`CosineDerivatives.loss_and_cost`."""
        if self.loss.pd_fix.attracting_only:
            # The repelling pairs are left out of the curvature, not of the loss.
            every = self.loss.replaced(pd_fix=PDFix.FULL)
            return every.derivatives(self.relation, self.u, shares=self.shares).loss_and_cost()
        return self._loss_and_cost(totals or self.node_sums().totals(self.u))

    def _loss_and_cost(self, totals: Totals) -> tuple[Tensor, Tensor]:
        value = totals.value.to(self.u.dtype)
        return value, value

    def _block(
        self,
        positive: Tensor,
        negative: Tensor,
        cosine: Tensor,
        rows: Shares,
        columns: Shares,
        value: bool = False,
    ) -> _Block:
        """Return ``y``, ``c`` and, if asked for, the value of pairs with given multiplicities and cosines."""
        loss, nothing = self.loss, cosine.new_zeros(())
        attract, repel = weigh_pairs(loss.negative_weight, positive, negative, rows, columns)
        first, second = loss._checked_terms(cosine, attract, repel)
        if loss.pd_fix.attracting_only:
            first = loss._checked_terms(cosine, attract, nothing).first
        elif loss.pd_fix.second_only:
            first = torch.zeros_like(first)
        return -first, second, loss._checked_value(cosine, attract, repel) if value else nothing

    def _rows(self, start: int, stop: int, columns: slice = slice(None), value: bool = False) -> _Block:
        positive, negative = self.relation.rows(start, stop, columns)
        cosine = self.u[start:stop] @ self.u[columns].T
        # No rule of a loss sees a point with itself, where derivatives may be infinite.
        cosine.diagonal(start - columns.indices(self.n)[0]).zero_()
        return self._block(positive, negative, cosine, self.shares[start:stop], self.shares[columns], value)

    def _sums(self, count: int, block: Callable[[int, int, bool], _Block]) -> NodeSums:
        """Return sums over the neighbours of points whose rows ``block(start, stop, with_value)`` are (B, N)."""
        u = self._summands()
        degree, neighbors = u.new_zeros(count), u.new_zeros(count, u.shape[1])
        value = u.new_zeros((), dtype=torch.float64)
        for here in row_ranges(count, self.n):
            y, _, part = block(here.start, here.stop, not self.loss.value_from_sums)
            y = y.to(u)
            degree[here], neighbors[here] = y.sum(1), y @ u
            value = value + part.double() / 2
        moments = None
        if not self.loss.linear:
            points = torch.arange(count, device=self.u.device)
            made = MomentPart(points, lambda a, b: (cast("Tensor", block(a, b, False)[1]), None), self.u)
            moments = PairMoments([made], degree.new_zeros(0), neighbors.new_zeros(0, *neighbors.shape))
        return NodeSums(degree, neighbors, moments, value).checked(type(self.loss).__name__)

    def _summands(self) -> Tensor:
        """Return the unit embeddings as they are summed up: in float64 where the value is the difference of sums."""
        return self.u.double() if self.loss.value_from_sums else self.u

    def _target_relation(self) -> TargetRelation:
        return cast("TargetRelation", self.relation)
