"""Losses of anchors over a data set at a linear price: exact positives, and negatives from a random bank of points."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from contrastive_curvature.hessian.derivatives import DatasetDerivatives, NodeSums, Totals, refuse_sampled
from contrastive_curvature.hessian.moments import MomentPart, PairMoments
from contrastive_curvature.losses.sampled import BankedPoints, Candidates, ranges, unit
from contrastive_curvature.losses.sides import one_tower
from contrastive_curvature.losses.weighting import find_classes

if TYPE_CHECKING:
    from contrastive_curvature.losses.rows import RowLoss


_HELD = 2**23
"""Pairs of the points of a batch whose second derivatives are kept instead of being computed again."""

_PAIRS = 2**17
"""Pairs whose derivatives are computed at once: few enough for the cache of a core."""

_COSINES = 2**23
"""Cosines of the bank with all points that are held at once."""

_ROWS = 2**11
"""Points that are held in float64 at once, of all."""

_STATISTICS = 2**27
"""Numbers that are kept of all anchors: one GiB."""


class SampledRowDerivatives(DatasetDerivatives):
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

    The statistics of all anchors stay in memory, N K numbers.

    Args:
        loss: The loss, with a fix that couples no points.
        u: Unit embeddings, shape (N, D).
        labels: Class labels, int64, shape (N,).
        bank: Which points are the bank, int64, shape (M,), see :class:`BankedPoints`.
        negatives_per_anchor: How many negatives an anchor had in training: of the N - 1 others each counts as much
            less. ``None`` counts all.
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
        self._known = _Anchors(loss, self.points, share)
        self.anchors = int(self._known.kept.sum())
        self.skipped = self.n - self.anchors
        self.scale = loss._scale(self._known.terms, one_tower(self.n), self.anchors, as_data=True)

    def node_sums(self) -> NodeSums:
        """See :meth:`CosineDerivatives.node_sums`."""
        return self.sums_for(self.u, self.labels)

    def sums_for(self, u: Tensor, targets: Tensor) -> NodeSums:
        """See :meth:`DatasetDerivatives.sums_for`; a point is the one of its label that is closest to it."""
        x, index = unit(u), find_classes(self.points.classes, targets)
        degree, neighbors = x.new_zeros(len(x)), torch.zeros_like(x)
        vectors, bound = x.new_zeros(len(self.loss.root_signs), *x.shape), x.new_zeros(len(x))
        met = [
            (rows, _Pairs(self._known, self.scale, x[rows], index[rows], place, others))
            for rows, place, others in self.points.met(x, index)
        ]
        holds = sum(len(rows) * len(pairs.others.u) for rows, pairs in met) <= _HELD
        for rows, pairs in met:
            for start, stop in pairs.blocks(len(rows)):
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
                    pairs.held.append((terms.second, terms.cosine))
        moments = None
        if not self.loss.linear:
            parts = [MomentPart(rows, pairs.weigh, pairs.others.u) for rows, pairs in met]
            signs = vectors.new_tensor(self.loss.root_signs)
            moments = PairMoments(parts, signs, vectors, bound + vectors.square().sum((0, 2)), u.dtype)
        return NodeSums(degree, neighbors, moments, degree.new_zeros(())).checked(type(self.loss).__name__)

    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`CosineDerivatives.loss_and_cost`; the cost is the loss above the least that it can be."""
        cost = (self._known.total - self._known.least).clamp(min=0)
        return (self.scale * self._known.total).to(self.u.dtype), (self.scale * cost).to(self.u.dtype)


class _Anchors:
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
        least: What no embeddings make it fall below.
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
        self.terms, self.total, self.least = 0.0, zeros(()), zeros(())
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
        for start, stop in ranges(len(same.u), max(len(u), self._width), _PAIRS):
            some = torch.arange(start, stop, device=u.device)
            place = same.place[some]
            equal = same.index[some].unsqueeze(1) == index
            positive = (equal & own).double()
            positive[some - start, some] = 0.0
            negative = (~equal & ~own) * (self.share * points.weight[same.index[some]].unsqueeze(1))
            cosine, positive, negative = (F.pad(part, pad) for part in (same.u[some] @ u.T, positive, negative))
            kept = loss._has_terms(positive, negative)
            self.terms += float(loss._checked("_counts_at", cosine, positive, negative).sum())
            self.statistics[place], self.kept[place] = loss._statistics(cosine, positive, negative), kept
            if bool(kept.any()):
                self.total += loss._checked("_value", cosine[kept], positive[kept], negative[kept]).sum()
                self.least += loss._least(positive[kept], negative[kept]).sum()

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


class _PairTerms(NamedTuple):
    """What pairs of points and candidates add to the blocks of the points, each (B, C) and scaled.

    Args:
        y: ``-dL/ds`` with the point as anchor, and as candidate.
        second: Second derivatives of both; ``None`` for a linear loss.
        roots: Roots of the points as anchors.
        cosine: Cosines of the pairs.
    """

    y: Tensor
    second: Tensor | None
    roots: tuple[Tensor, ...]
    cosine: Tensor


class _Pairs:
    """Derivatives between B points and C candidates, in both directions.

    Args:
        anchors: What is known of the whole data set.
        scale: By what the loss of all anchors is multiplied.
        x: Unit embeddings of the points in float64, shape (B, D).
        index: Numbers of their classes, shape (B,).
        place: Their places among all points, shape (B,).
        others: The candidates.

    Attributes:
        held: Second derivatives and cosines of blocks of points, from the first one on, for :meth:`weigh`.
    """

    def __init__(
        self, anchors: _Anchors, scale: float, x: Tensor, index: Tensor, place: Tensor, others: Candidates
    ) -> None:
        self.anchors, self.scale = anchors, scale
        self.x, self.index, self.place, self.others = x, index, place, others
        self.held: list[tuple[Tensor, Tensor]] = []

    def blocks(self, count: int) -> Iterator[tuple[int, int]]:
        """Iterate over ranges of so many points, of a bounded number of pairs."""
        return ranges(count, len(self.others.u), _PAIRS)

    def terms(self, start: int, stop: int) -> _PairTerms:
        """Return the derivatives of points ``start..stop``."""
        known, others = self.anchors, self.others
        loss, points = known.loss, known.points
        place, index = self.place[start:stop], self.index[start:stop]
        cosine = self.x[start:stop] @ others.u.T
        equal = index.unsqueeze(1) == others.index
        nothing = torch.zeros_like(cosine)
        if others.positives:
            related = (equal & (place.unsqueeze(1) != others.place)).double()
            times = points.weight.new_ones(len(index), 1)
            as_anchor, as_candidate = (related, nothing), (related.T, nothing.T)
        else:
            related = known.share * (~equal).double()
            times = points.weight[index].unsqueeze(1)
            as_anchor, as_candidate = (nothing, times * related), (nothing.T, related.T)
        mine = loss._checked_terms(cosine, *as_anchor, known.statistics[place], known.kept[place])
        theirs = loss._checked_terms(cosine.T, *as_candidate, *known.of(others))
        y = -self.scale * (mine.first + times * theirs.first.T)
        if mine.second is None or theirs.second is None:
            return _PairTerms(y, None, (), cosine)
        own = theirs.second
        for sign, root in zip(loss.root_signs, theirs.roots, strict=True):
            own = torch.addcmul(own, root, root, value=float(sign))
        second = self.scale * (mine.second + times * own.T)
        return _PairTerms(y, second, tuple(self.scale**0.5 * root for root in mine.roots), cosine)

    def weigh(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return second derivatives of points ``start..stop`` of a loss that has some, and their cosines."""
        if self.held:
            self.held = [_joined(self.held)]
            second, cosine = self.held[0]
            return second[start:stop], cosine[start:stop]
        found = [self.terms(start + a, start + b) for a, b in self.blocks(stop - start)]
        return _joined([(cast("Tensor", terms.second), terms.cosine) for terms in found])


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    seconds, cosines = zip(*parts, strict=True)
    return torch.cat(seconds), torch.cat(cosines)
