"""Any loss of pairs over a data set at a linear price: exact positives, and negatives from a sample of points."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contrastive_curvature.hessian.derivatives import NodeSums, Totals
from contrastive_curvature.hessian.moments import MomentPart, PairMoments
from contrastive_curvature.losses.rules import check_sums, terms_of, value_of
from contrastive_curvature.losses.sampled_refusals import UncoupledDerivatives, refuse_sampled
from contrastive_curvature.losses.sampled_rows_moments import SpreadMoments
from contrastive_curvature.losses.sampled_rows_pairs import find_places
from contrastive_curvature.losses.sampled_rows_points import BankedPoints, Candidates, unit
from contrastive_curvature.losses.weighting import ClassShares, PairFactors

if TYPE_CHECKING:
    from contrastive_curvature.losses.base import PairLoss

__all__ = ["SampledPairDerivatives"]

_PAIRS = 2**20
"""Pairs whose derivatives are computed at once."""


class SampledPairDerivatives(UncoupledDerivatives):
    """What a loss of pairs adds to the block of every point of a data set, from N (M + size of a class) pairs.

    Positives are exact. The M sampled points stand for all points of other classes: one of them counts ``n / m`` times,
    with n points of other classes in the data set and m of them in the sample. Every sum over the neighbours of a point
    is unbiased; all is computed in float64.

    Args:
        loss: The loss, with a fix that couples no points.
        u: Unit embeddings, shape (N, D).
        labels: Class labels, int64, shape (N,).
        sample: Which points are sampled, int64, shape (M,).

    Raises:
        UnsupportedError: The fix couples points.
        InputError: The sample has no point of another class for some points that have one.
    """

    def __init__(self, loss: PairLoss, u: Tensor, labels: Tensor, sample: Tensor) -> None:
        if loss.coupled:
            refuse_sampled(f"pd_fix={str(loss.pd_fix)!r} couples points with each other")
        self.loss, self.u, self.labels, self.n = loss, u, labels, len(u)
        self.points = BankedPoints(u, labels, sample)
        self.factors = PairFactors(1 - loss.negative_weight, loss.negative_weight)
        classes, sizes = self.points.classes, self.points.sizes
        self.shares = ClassShares.of_counts(classes, sizes, loss.normalization, torch.float64).shares
        self._summed: Totals | None = None

    def node_sums(self) -> NodeSums:
        """See :meth:`CosineDerivatives.node_sums`."""
        sums = self.sums_for(self.u, self.labels)
        self._summed = sums.totals(self.u)
        return sums

    def sums_for(self, u: Tensor, targets: Tensor) -> NodeSums:
        """See :meth:`DatasetDerivatives.sums_for`."""
        x, index = unit(u), self.points.find(targets.to(self.labels.device))
        degree, neighbors, value = x.new_zeros(len(x)), torch.zeros_like(x), x.new_zeros(())
        bound = x.new_zeros(len(x))
        parts: list[tuple[Tensor, PairMoments]] = []
        place = torch.empty_like(index)
        for rows, others in self._candidates(index):
            if others.positives:
                place[rows] = find_places(x[rows], index[rows], others)
            for some in rows.split(max(1, _PAIRS // max(1, len(others.u)))):
                first, second, part = self._pairs(x[some], index[some], place[some], others)
                degree[some] -= first.sum(1)
                neighbors[some] -= first @ others.u
                value = value + part / 2
                if second is not None:
                    bound[some] += second.abs().sum(1)
            if not self.loss.linear and len(others.u):
                weigh = self._weights(x[rows], index[rows], place[rows], others)
                none = x.new_zeros(0, len(rows), x.shape[1])
                parts.append((rows, PairMoments([MomentPart(0, len(rows), weigh, others.u)], none[:, 0, 0], none)))
        spread = None if self.loss.linear else SpreadMoments(parts, len(x), u.dtype, bound)
        return check_sums(self.loss, NodeSums(degree, neighbors, spread, value))

    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`CosineDerivatives.loss_and_cost`."""
        found = totals or self._summed or self.node_sums().totals(self.u)
        value = found.value.to(self.u.dtype)
        return value, value

    def class_weights(self) -> None:
        """See :meth:`DatasetDerivatives.class_weights`: weights depend on more than the classes."""

    def _candidates(self, index: Tensor) -> Iterator[tuple[Tensor, Candidates]]:
        yield from self.points.groups(index)
        yield torch.arange(len(index), device=index.device), self.points.bank

    def _pairs(
        self, x: Tensor, index: Tensor, place: Tensor, others: Candidates
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """First and second derivatives and the value of pairs of points (B,) with candidates, (B, C) each."""
        itself = place.unsqueeze(1) == others.place
        equal = (index.unsqueeze(1) == others.index) & ~itself
        nothing = x.new_zeros(1, 1).expand(equal.shape)
        counts = (equal.double(), nothing) if others.positives else (nothing, self._standing_for(index, others))
        attract, repel = self.factors.weigh(*counts, self.shares[index], self.shares[others.index])
        cosine = (x @ others.u.T).masked_fill(itself, 0.0)
        first, second = terms_of(self.loss, cosine, attract, repel)
        if self.loss.pd_fix.second_only:
            first = torch.zeros_like(first)
        value = cosine.new_zeros(()) if self.loss.value_from_sums else value_of(self.loss, cosine, attract, repel)
        return first, second, value

    def _standing_for(self, index: Tensor, others: Candidates) -> Tensor:
        return self.points.weight[index].unsqueeze(1) * (index.unsqueeze(1) != others.index)

    def _weights(self, x: Tensor, index: Tensor, place: Tensor, others: Candidates) -> Callable[[int, int], Tensor]:
        def weigh(start: int, stop: int) -> Tensor:
            second = self._pairs(x[start:stop], index[start:stop], place[start:stop], others)[1]
            if second is None:
                msg = "a linear loss has no moments"
                raise RuntimeError(msg)
            return second

        return weigh
