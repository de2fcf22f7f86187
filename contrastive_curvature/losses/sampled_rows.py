"""Losses of anchors over a data set at a linear price: exact positives, and negatives from a random bank of points."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contrastive_curvature.hessian.derivatives import NodeSums, Totals
from contrastive_curvature.hessian.moments import MomentPart, PairMoments
from contrastive_curvature.losses.rules import check_sums
from contrastive_curvature.losses.sampled_refusals import UncoupledDerivatives, refuse_sampled
from contrastive_curvature.losses.sampled_rows_anchors import SampledAnchors
from contrastive_curvature.losses.sampled_rows_moments import SpreadMoments
from contrastive_curvature.losses.sampled_rows_pairs import SampledPairs, find_places
from contrastive_curvature.losses.sampled_rows_points import BankedPoints, Candidates, unit
from contrastive_curvature.losses.sides import Sides

if TYPE_CHECKING:
    from contrastive_curvature.losses.rows import RowLoss

__all__ = ["SampledRowDerivatives"]

_HELD = 2**23
"""Pairs of the points of a batch whose second derivatives are kept instead of being computed again."""


class SampledRowDerivatives(UncoupledDerivatives):
    """What a loss of anchors adds to the block of every point of a data set, from N (M + size of a class) pairs.

    Positives are exact. The M points of the bank stand for all points of other labels, as an anchor's negatives and as
    the anchors whose negative a point is: one of the bank counts ``n / m`` times, with n points of other labels in the
    data set and m of them in the bank. With all points in the bank, everything is that of
    :class:`~contrastive_curvature.losses.row_derivatives.RowDerivatives`.

    The rows of the anchors of the bank are known exactly, so that what a point gets as their negative is a sample of
    exact terms. Of a uniform bank larger than the largest class it is unbiased, as is everything of losses that are
    linear in the negatives (``SigLIPLoss``, ``TripletLoss`` with ``reduction="sum"``). What other losses give an
    anchor, and its positives, divides by sums over the bank: its bias is of order 1 / M, once the bank has several of
    the few hard negatives that carry the sum of a steep loss (``benchmarks/negative_samples_bias.py``).

    All is computed in float64; the statistics of all anchors stay in memory, N K numbers.

    Args:
        loss: The loss, with a fix that couples no points.
        u: Unit embeddings, shape (N, D).
        labels: Class labels, int64, shape (N,).
        bank: Which points are the bank, int64, shape (M,).
        negatives_per_anchor: How many negatives an anchor had in training: of the N - 1 others each counts as much
            less. ``None`` counts all.

    Attributes:
        anchors: Number of anchors that have a term.
        skipped: Number of anchors that have none.

    Raises:
        UnsupportedError: The fix couples points, the number of negatives means nothing to the loss, or what the loss
            keeps of every anchor grows with its candidates and is too much.
        InputTypeError: ``labels`` or ``bank`` is no tensor of int64.
        InputError: A shape is wrong, an index is out of range, or the bank has no point of another label for some
            points that have one.
    """

    def __init__(
        self, loss: RowLoss, u: Tensor, labels: Tensor, bank: Tensor, negatives_per_anchor: int | None = None
    ) -> None:
        if loss.coupled:
            refuse_sampled(f"pd_fix={str(loss.pd_fix)!r} couples points with each other")
        loss.check_dataset(negatives_per_anchor)
        self.loss, self.u, self.labels, self.n = loss, u, labels, len(u)
        share = 1.0 if negatives_per_anchor is None else min(1.0, negatives_per_anchor / max(1, self.n - 1))
        self.points = BankedPoints(u, labels, bank)
        self._known = SampledAnchors(loss, self.points, share)
        self._anchors = int(self._known.kept.sum())
        self.skipped = self.n - self._anchors
        self.scale = loss._scale(self._known.terms, Sides.one_tower(self.n), self._anchors, as_data=True)

    @property
    def anchors(self) -> int:
        """Number of anchors that have a term."""
        return self._anchors

    def node_sums(self) -> NodeSums:
        """See :meth:`CosineDerivatives.node_sums`."""
        return self.sums_for(self.u, self.labels)

    def sums_for(self, u: Tensor, targets: Tensor) -> NodeSums:
        """See :meth:`DatasetDerivatives.sums_for`; a point is the one of its label that is closest to it."""
        x, index = unit(u), self.points.find(targets)
        degree, neighbors = x.new_zeros(len(x)), torch.zeros_like(x)
        vectors, bound = x.new_zeros(len(self.loss.root_signs), *x.shape), x.new_zeros(len(x))
        met = self._met(x, index)
        holds = sum(len(rows) * len(pairs.others.u) for rows, pairs in met) <= _HELD
        for rows, pairs in met:
            for start, stop in pairs.blocks(0, len(rows)):
                terms, here = pairs.terms(start, stop), rows[start:stop]
                if not self.loss.pd_fix.second_only:
                    degree[here] += terms.y.sum(1)
                    neighbors[here] += terms.y @ pairs.others.u
                if terms.second is None:
                    continue
                bound[here] += torch.linalg.vector_norm(terms.second, ord=1, dim=1)
                for vector, root in zip(vectors, terms.roots, strict=True):
                    vector[here] += root @ pairs.others.u
                if holds:
                    pairs.hold(terms)
        moments = None
        if not self.loss.linear:
            parts = [(rows, self._moments(rows, pairs, vectors)) for rows, pairs in met]
            moments = SpreadMoments(parts, len(x), u.dtype, bound + vectors.square().sum((0, 2)))
        return check_sums(self.loss, NodeSums(degree, neighbors, moments, degree.new_zeros(())))

    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`CosineDerivatives.loss_and_cost`; the cost is what the loss is above the least that it can be."""
        del totals
        cost = (self._known.total - self._known.least).clamp(min=0)
        return (self.scale * self._known.total).to(self.u.dtype), (self.scale * cost).to(self.u.dtype)

    def _met(self, x: Tensor, index: Tensor) -> list[tuple[Tensor, SampledPairs]]:
        """Which of the points meet which candidates: those of their own classes, and all of them the bank, at last."""
        place = torch.empty_like(index)
        found: list[tuple[Tensor, Candidates]] = []
        for rows, same in self.points.groups(index):
            place[rows] = find_places(x[rows], index[rows], same)
            found.append((rows, same))
        found.append((torch.arange(len(x), device=x.device), self.points.bank))
        return [
            (rows, SampledPairs(self._known, self.scale, x[rows], index[rows], place[rows], others))
            for rows, others in found
        ]

    def _moments(self, rows: Tensor, pairs: SampledPairs, vectors: Tensor) -> PairMoments:
        # The vectors of a point run over all its candidates, and count once.
        whole = not pairs.others.positives
        signs = vectors.new_tensor(self.loss.root_signs if whole else ())
        part = MomentPart(0, len(rows), pairs.weigh, pairs.others.u)
        return PairMoments([part] if len(pairs.others.u) else [], signs, vectors if whole else vectors[:0, rows])
