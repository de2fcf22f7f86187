"""Losses of anchors over a data set at a linear price: exact positives, and negatives from a random bank of points."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from contrastive_curvature.hessian.derivatives import Totals, refuse_sampled
from contrastive_curvature.losses.sampled import BankedPoints, Candidates, PairTerms, SampledDerivatives
from contrastive_curvature.losses.sides import one_tower
from contrastive_curvature.pairs.relation import row_ranges

if TYPE_CHECKING:
    from contrastive_curvature.losses.rows import RowLoss


_PAIRS = 2**17
"""Pairs whose derivatives are computed at once: few enough for the cache of a core."""

_COSINES = 2**23
"""Cosines of the bank with all points that are held at once."""

_ROWS = 2**11
"""Points that are held in float64 at once, of all."""

_STATISTICS = 2**27
"""Numbers that are kept of all anchors: one GiB."""


class SampledRowDerivatives(SampledDerivatives):
    """What a loss of anchors adds to the block of every point of a data set, from N (M + size of a class) pairs.

    Positives are exact. The M points of the bank stand for all points of other labels, as an anchor's negatives and as
    the anchors whose negative a point is: one of the bank counts ``n / m`` times, with n points of other labels in the
    data set and m of them in the bank. With all points in the bank, everything is that of
    :class:`~contrastive_curvature.losses.row_derivatives.RowDerivatives`.

    The rows of the anchors of the bank are known exactly, so that what a point gets as their negative is a sample of
    exact terms. Of a uniform bank larger than the largest class it is unbiased, as is everything of losses that are
    linear in the negatives (``SigLIPLoss``, ``TripletLoss`` with ``reduction="sum"``). What other losses give an
    anchor, and its positives, divides by sums over the bank: its bias is of order 1 / M, once the bank has several of
    the few hard negatives that carry the sum of a steep loss (docs/large_data.md).

    The statistics of all anchors stay in memory, N K numbers.

    Args:
        loss: The loss, with a fix that couples no points.
        u: Unit embeddings, shape (N, D).
        labels: Class labels, int64, shape (N,).
        bank: Which points are the bank, int64, shape (M,), see :class:`BankedPoints`.
        negatives_per_anchor: How many negatives an anchor had in training: of the N - 1 others each counts as much
            less. ``None`` counts all.
    """

    loss: RowLoss

    def __init__(
        self, loss: RowLoss, u: Tensor, labels: Tensor, bank: Tensor, negatives_per_anchor: int | None = None
    ) -> None:
        super().__init__(loss, u, labels, bank)
        loss.check_dataset(negatives_per_anchor)
        self.root_signs = loss.root_signs
        share = 1.0 if negatives_per_anchor is None else min(1.0, negatives_per_anchor / max(1, self.n - 1))
        self._known = _BankedAnchors(loss, self.points, share)
        self.anchors = int(self._known.kept.sum())
        self.skipped = self.n - self.anchors
        self.scale = loss._scale(self._known.terms, one_tower(self.n), self.anchors, as_data=True)

    def pair_terms(self, x: Tensor, index: Tensor, place: Tensor, others: Candidates) -> PairTerms:
        """See :meth:`SampledDerivatives.pair_terms`."""
        known, loss, weight = self._known, self.loss, self.points.weight
        cosine = x @ others.u.T
        equal = index.unsqueeze(1) == others.index
        nothing = torch.zeros_like(cosine)
        if others.positives:
            related = (equal & (place.unsqueeze(1) != others.place)).double()
            times = weight.new_ones(len(index), 1)
            as_anchor, as_candidate = (related, nothing), (related.T, nothing.T)
        else:
            related = known.share * (~equal).double()
            times = weight[index].unsqueeze(1)
            as_anchor, as_candidate = (nothing, times * related), (nothing.T, related.T)
        mine = loss._checked_terms(cosine, *as_anchor, known.statistics[place], known.kept[place])
        theirs = loss._checked_terms(cosine.T, *as_candidate, *known.of(others))
        y = -self.scale * (mine.first + times * theirs.first.T)
        if mine.second is None or theirs.second is None:
            return PairTerms(y, None, cosine)
        own = theirs.second
        for sign, root in zip(loss.root_signs, theirs.roots, strict=True):
            own = torch.addcmul(own, root, root, value=float(sign))
        second = self.scale * (mine.second + times * own.T)
        return PairTerms(y, second, cosine, roots=tuple(self.scale**0.5 * root for root in mine.roots))

    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`CosineDerivatives.loss_and_cost`; the cost is the loss above the least that it can be."""
        value, cost = self.scale * self._known.total, self.scale * self._known.cost
        return value.to(self.u.dtype), cost.to(self.u.dtype)


class _BankedAnchors:
    """Statistics of the rows of N anchors, in float64, from one look at their candidates.

    The row of an anchor has all its positives, and the bank for its negatives. The anchors of the bank, of which every
    point is a candidate, are known from rows of all N points, too: the share of a point in a softmax that has it in its
    sum is below one, whether or not the point is in the bank.

    Args:
        loss: The loss.
        points: All points and the bank.
        share: How much a negative counts.

    Attributes:
        statistics: See :meth:`RowLoss._statistics`, of all points sorted by class, shape (N, K).
        kept: Whether an anchor has a term, in the same order, shape (N,).
        terms: Number of terms of all anchors.
        total: Loss of all anchors, not scaled.
        cost: What of it is above the least at any embeddings.
    """

    def __init__(self, loss: RowLoss, points: BankedPoints, share: float) -> None:
        self.loss, self.points, self.share = loss, points, share
        n, many = len(points.index), len(points.bank.u)
        zeros = points.weight.new_zeros
        probe = [loss._statistics(*[zeros(1, wide)] * 3).shape[1] for wide in (1, 2)]
        # What grows with the candidates has to be equally long for all anchors.
        self._width = points.widest() + many if probe[0] != probe[1] else 0
        size = probe[0] + (probe[1] - probe[0]) * max(0, self._width - 1)
        if n * size > _STATISTICS:
            refuse_sampled(f"{type(loss).__name__} keeps {size} numbers of each of the {n} anchors, which is too much")
        self.statistics = zeros(n, size)
        self.kept = torch.zeros(n, dtype=torch.bool, device=points.index.device)
        self.terms, self.total, self.cost = 0.0, zeros(()), zeros(())
        for _, same in points.groups(points.index):
            self._look_at(same)
        # What grows with the candidates is a list of them, from which the bank's serve as well.
        sampled = bool(self._width) or not size or not many
        self._of_bank = self.statistics[points.bank.place] if sampled else self._whole_rows(size)

    def of(self, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """Return the statistics of candidates as anchors, (C, K), and whether they have a term, (C,)."""
        statistics = self.statistics[candidates.place] if candidates.positives else self._of_bank
        return statistics, self.kept[candidates.place]

    def _look_at(self, same: Candidates) -> None:
        """Fill in the anchors of some classes."""
        loss, points, bank = self.loss, self.points, self.points.bank
        u, index = torch.cat([same.u, bank.u]), torch.cat([same.index, bank.index])
        own = (torch.arange(len(index), device=u.device) < len(same.u)).unsqueeze(0)
        pad = (0, max(0, self._width - len(u)))
        for rows in row_ranges(len(same.u), max(len(u), self._width), _PAIRS):
            some = torch.arange(rows.start, rows.stop, device=u.device)
            place = same.place[some]
            equal = same.index[some].unsqueeze(1) == index
            positive = (equal & own).double()
            positive[some - rows.start, some] = 0.0
            negative = (~equal & ~own) * (self.share * points.weight[same.index[some]].unsqueeze(1))
            cosine, positive, negative = (F.pad(part, pad) for part in (same.u[some] @ u.T, positive, negative))
            kept = loss._has_terms(positive, negative)
            self.terms += float(loss._checked("_counts_at", cosine, positive, negative).sum())
            self.statistics[place], self.kept[place] = loss._statistics(cosine, positive, negative), kept
            if bool(kept.any()):
                given = cosine[kept], positive[kept], negative[kept]
                value = loss._checked("_value", *given)
                self.total += value.sum()
                self.cost += loss._checked("_cost", value, *given).sum()

    def _whole_rows(self, size: int) -> Tensor:
        """Return the statistics of the anchors of the bank over all N points, shape (M, K)."""
        points, bank, n = self.points, self.points.bank, len(self.points.index)
        out = bank.u.new_zeros(len(bank.u), size)
        everywhere, few = torch.arange(n, device=bank.u.device), max(1, _PAIRS // max(1, n))
        for anchors in torch.arange(len(bank.u), device=bank.u.device).split(max(1, _COSINES // max(1, n))):
            cosines = torch.cat([bank.u[anchors] @ points.wide(some).T for some in everywhere.split(_ROWS)], dim=1)
            for some, cosine in zip(anchors.split(few), cosines.split(few), strict=True):
                positive = (bank.index[some].unsqueeze(1) == points.index).double()
                negative = self.share * (1 - positive)
                positive.scatter_(1, bank.place[some].unsqueeze(1), 0.0)
                out[some] = self.loss._statistics(cosine, positive, negative)
        return out
