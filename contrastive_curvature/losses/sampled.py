"""A sample of points that stands for all negatives of a data set: points by class, and losses of pairs.

Positives are exact. One of the M sampled points counts ``n / m`` times for a point that has n points of other classes
in the data set and m of them in the sample. All is computed in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from contrastive_curvature.hessian.derivatives import DatasetDerivatives, NodeSums, refuse_sampled
from contrastive_curvature.hessian.moments import MomentPart, PairMoments
from contrastive_curvature.losses.weighting import ClassShares, find_classes, weigh_pairs
from contrastive_curvature.pairs.relation import row_ranges

if TYPE_CHECKING:
    from contrastive_curvature.losses.base import PairLoss


_TOGETHER = 256
"""Points of small classes that are looked at together: one product instead of many small ones."""

_PAIRS = 2**17
"""Pairs whose derivatives are computed at once: few enough for the cache of a core."""

_HELD = 2**23
"""Pairs of the points of a batch whose second derivatives are kept instead of being computed again."""


@dataclass(frozen=True)
class Candidates:
    """Some points, and what they are to others.

    Args:
        u: Unit embeddings in float64, shape (C, D).
        place: Their places among all points sorted by class, shape (C,).
        index: Numbers of their classes, shape (C,).
        positives: Whether they are candidates as positives, those of other classes not counting; otherwise as
            negatives, those of the same class not counting.
    """

    u: Tensor
    place: Tensor
    index: Tensor
    positives: bool


class BankedPoints:
    """N points, sorted by class, and M of them as the bank that stands for all points of other classes.

    Args:
        u: Unit embeddings, shape (N, D).
        labels: Class labels, int64, shape (N,).
        bank: Which points are the bank, int64, shape (M,); of two classes at least, where there are two.

    Attributes:
        index: Number of the class of every point, sorted, shape (N,).
        sizes: Number of points of every class, shape (C,).
        bank: The bank.
        weight: How many points of other classes one of the bank stands for, by class, float64, shape (C,); zero
            without another class.
    """

    def __init__(self, u: Tensor, labels: Tensor, bank: Tensor) -> None:
        n = len(u)
        self.classes, inverse, self.sizes = labels.unique(return_inverse=True, return_counts=True)
        order = inverse.argsort(stable=True)
        self._u, self._order, self.index = u, order, inverse[order]
        self._starts = self.sizes.cumsum(0) - self.sizes
        place = torch.empty_like(order).scatter_(0, order, torch.arange(n, device=u.device))
        self.bank = Candidates(self.wide(place[bank]), place[bank], inverse[bank], positives=False)
        there = n - self.sizes
        drawn = len(bank) - inverse[bank].bincount(minlength=len(self.classes))
        self.weight = torch.where(there > 0, there.double() / drawn.clamp(min=1), 0.0)

    def wide(self, places: Tensor) -> Tensor:
        """Return the unit embeddings at some places in float64, of length one to its precision."""
        return unit(self._u[self._order[places]])

    def groups(self, index: Tensor) -> Iterator[tuple[Tensor, Candidates]]:
        """Iterate over points of some classes with all points of the same classes; small classes together.

        Args:
            index: Numbers of the classes of B points, shape (B,).

        Yields:
            Which of the B points, in rising order, and all N points of their classes as candidates.
        """
        order = index.argsort(stable=True)
        found, counts = index[order].unique_consecutive(return_counts=True)
        sizes = self.sizes[found].tolist()
        start = row = together = rows = 0
        for k, (size, count) in enumerate(zip(sizes, counts.tolist(), strict=True)):
            if k > start and together + size > _TOGETHER:
                yield self._group(order[row : row + rows], found[start:k])
                start, row, together, rows = k, row + rows, 0, 0
            together, rows = together + size, rows + count
        if sizes:
            yield self._group(order[row : row + rows], found[start:])

    def met(self, x: Tensor, index: Tensor) -> Iterator[tuple[Tensor, Tensor, Candidates]]:
        """Iterate over the candidates of B points: those of their own classes, and for all of them the bank, at last.

        Args:
            x: Unit embeddings in float64, shape (B, D).
            index: Numbers of their classes, shape (B,).

        Yields:
            Which of the B points; their places among all points, the closest of their class; and the candidates.
        """
        place = torch.empty_like(index)
        for rows, same in self.groups(index):
            for part in row_ranges(len(rows), len(same.u), _PAIRS):
                some = rows[part]
                cosine = (x[some] @ same.u.T).masked_fill(index[some].unsqueeze(1) != same.index, -torch.inf)
                place[some] = same.place[cosine.argmax(1)]
            yield rows, place[rows], same
        yield torch.arange(len(x), device=x.device), place, self.bank

    def _group(self, rows: Tensor, classes: Tensor) -> tuple[Tensor, Candidates]:
        sizes = self.sizes[classes]
        before = sizes.cumsum(0) - sizes
        shift = (self._starts[classes] - before).repeat_interleave(sizes)
        place = shift + torch.arange(len(shift), device=shift.device)
        return rows.sort().values, Candidates(self.wide(place), place, self.index[place], positives=True)


class PairTerms(NamedTuple):
    """What pairs of B points and C candidates add to the blocks of the points, each (B, C).

    Args:
        y: ``-dL/ds``, of both directions of a pair.
        second: Second derivatives; ``None`` for a linear loss.
        cosine: Cosines of the pairs.
        value: What they add to the value of the loss.
    """

    y: Tensor
    second: Tensor | None
    cosine: Tensor
    value: Tensor


class SampledPairDerivatives(DatasetDerivatives):
    """What a loss of pairs adds to the block of every point of a data set, from N (M + size of a class) pairs.

    Every sum over the neighbours of a point is unbiased.

    Args:
        loss: The loss, with a fix that couples no points.
        u: Unit embeddings, shape (N, D).
        labels: Class labels, int64, shape (N,).
        sample: Which points are sampled, int64, shape (M,), see :class:`BankedPoints`.
    """

    def __init__(self, loss: PairLoss, u: Tensor, labels: Tensor, sample: Tensor) -> None:
        if loss.coupled:
            refuse_sampled(f"pd_fix={str(loss.pd_fix)!r} couples points with each other")
        self.loss, self.u, self.labels = loss, u, labels
        self.n = self.anchors = len(u)
        self.points = BankedPoints(u, labels, sample)
        classes, sizes = self.points.classes, self.points.sizes
        self.shares = ClassShares.of_counts(classes, sizes, loss.normalization, torch.float64).shares

    def pair_terms(self, x: Tensor, index: Tensor, place: Tensor, others: Candidates) -> PairTerms:
        """Return the derivatives between B points, unit embeddings (B, D), their classes and places, and candidates."""
        itself = place.unsqueeze(1) == others.place
        same = index.unsqueeze(1) == others.index
        nothing = x.new_zeros(1, 1).expand(same.shape)
        stands_for = self.points.weight[index].unsqueeze(1) * ~same
        counts = ((same & ~itself).double(), nothing) if others.positives else (nothing, stands_for)
        shares = self.shares[index], self.shares[others.index]
        attract, repel = weigh_pairs(self.loss.negative_weight, *counts, *shares)
        cosine = (x @ others.u.T).masked_fill(itself, 0.0)
        first, second = self.loss._checked_terms(cosine, attract, repel)
        return PairTerms(-first, second, cosine, self.loss._checked_value(cosine, attract, repel))

    def node_sums(self) -> NodeSums:
        """See :meth:`CosineDerivatives.node_sums`."""
        return self.sums_for(self.u, self.labels)

    def sums_for(self, u: Tensor, targets: Tensor) -> NodeSums:
        """See :meth:`DatasetDerivatives.sums_for`; a point is the one of its label that is closest to it."""
        x, index = unit(u), find_classes(self.points.classes, targets.to(self.labels.device))
        degree, neighbors, value = x.new_zeros(len(x)), torch.zeros_like(x), x.new_zeros(())
        bound = x.new_zeros(len(x))
        met = [
            (rows, _Pairs(self, x[rows], index[rows], place, others))
            for rows, place, others in self.points.met(x, index)
        ]
        holds = sum(len(rows) * len(pairs.others.u) for rows, pairs in met) <= _HELD
        for rows, pairs in met:
            for some in row_ranges(len(rows), len(pairs.others.u), _PAIRS):
                terms, here = pairs.terms(some), rows[some]
                value = value + terms.value / 2
                if not self.loss.pd_fix.second_only:
                    degree[here] += terms.y.sum(1)
                    neighbors[here] += terms.y @ pairs.others.u
                if terms.second is None:
                    continue
                bound[here] += torch.linalg.vector_norm(terms.second, ord=1, dim=1)
                if holds:
                    pairs.held.append((terms.second, terms.cosine))
        moments = None
        if not self.loss.linear:
            parts = [MomentPart(rows, pairs.weigh, pairs.others.u) for rows, pairs in met]
            moments = PairMoments(parts, x.new_zeros(0), x.new_zeros(0, *x.shape), bound, u.dtype)
        return NodeSums(degree, neighbors, moments, value).checked(type(self.loss).__name__)


@dataclass
class _Pairs:
    """Pairs of P points and C candidates.

    Args:
        derivatives: Of the loss.
        x: Unit embeddings of the points in float64, shape (P, D).
        index: Numbers of their classes, shape (P,).
        place: Their places among all points, shape (P,).
        others: The candidates.
        held: Second derivatives and cosines of blocks of points, from the first one on, for :meth:`weigh`.
    """

    derivatives: SampledPairDerivatives
    x: Tensor
    index: Tensor
    place: Tensor
    others: Candidates
    held: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def terms(self, some: slice) -> PairTerms:
        """Return the derivatives of some of the points."""
        return self.derivatives.pair_terms(self.x[some], self.index[some], self.place[some], self.others)

    def weigh(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return second derivatives of points ``start..stop`` of a loss that has some, and their cosines."""
        if self.held:
            self.held = [_joined(self.held)]
            second, cosine = self.held[0]
            return second[start:stop], cosine[start:stop]
        blocks = row_ranges(stop - start, len(self.others.u), _PAIRS)
        found = [self.terms(slice(start + some.start, start + some.stop)) for some in blocks]
        return _joined([(cast("Tensor", terms.second), terms.cosine) for terms in found])


def unit(u: Tensor) -> Tensor:
    """Return unit embeddings (B, D) in float64, of length one to its precision."""
    wide = u.detach().double()
    return wide / wide.norm(dim=1, keepdim=True)


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    seconds, cosines = zip(*parts, strict=True)
    return torch.cat(seconds), torch.cat(cosines)
