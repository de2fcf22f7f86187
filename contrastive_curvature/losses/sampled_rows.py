"""Losses of anchors over a data set at a linear price: exact positives, and negatives from a random bank of points."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.cross_roots import CrossRoots
from contrastive_curvature.hessian.derivatives import CosineDerivatives, DatasetDerivatives, NodeSums, Totals
from contrastive_curvature.hessian.moments import MomentPart, PairMoments
from contrastive_curvature.losses.row_rules import row_numbers, row_terms
from contrastive_curvature.losses.rules import check_sums
from contrastive_curvature.losses.sampled_rows_joined import joined_statistics
from contrastive_curvature.losses.sampled_rows_moments import SpreadMoments
from contrastive_curvature.losses.sampled_rows_points import BankedPoints, Candidates, unit
from contrastive_curvature.losses.sides import Sides

if TYPE_CHECKING:
    from contrastive_curvature.losses.rows import RowLoss, RowTerms

__all__ = ["SampledRowDerivatives"]

_PAIRS = 2**20
"""Pairs whose derivatives are computed at once."""

_HELD = 2**23
"""Pairs of the points of a batch whose second derivatives are kept instead of being computed again."""

_STATISTICS = 2**27
"""Numbers that are kept of all anchors: one GiB."""

_Weights = tuple[Tensor, Tensor]
"""Second derivatives between points and candidates, and the cosines of the same pairs, each (B, C)."""


class SampledRowDerivatives(DatasetDerivatives):
    """What a loss of anchors adds to the block of every point of a data set, from N (M + size of a class) pairs.

    Positives are exact. The M points of the bank stand for all points of other labels, as an anchor's negatives and as
    the anchors whose negative a point is: one of the bank counts ``n / m`` times, with n points of other labels in the
    data set and m of them in the bank. With all points in the bank, everything is that of
    :class:`~contrastive_curvature.losses.row_derivatives.RowDerivatives`.

    Of a uniform bank larger than the largest class, sums of losses that are linear in the pairs (``SigLIPLoss``,
    ``TripletLoss`` with ``reduction="sum"``) are unbiased; where a softmax or a mean over a sampled number divides by
    a sampled sum, the bias is of order 1 / M. So that no share of a softmax exceeds one, the row of an anchor of the
    bank counts the point itself once (:mod:`contrastive_curvature.losses.sampled_rows_joined`).

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
            _refuse(f"pd_fix={str(loss.pd_fix)!r} couples points with each other")
        loss.check_dataset(negatives_per_anchor)
        self.loss, self.u, self.labels, self.n = loss, u, labels, len(u)
        self.share = 1.0 if negatives_per_anchor is None else min(1.0, negatives_per_anchor / max(1, self.n - 1))
        self.points = BankedPoints(u, labels, bank)
        self.signs = u.new_tensor(loss.root_signs, dtype=torch.float64)
        self._look_at_all()

    @property
    def anchors(self) -> int:
        """Number of anchors that have a term."""
        return self._anchors

    def node_sums(self) -> NodeSums:
        """See :meth:`CosineDerivatives.node_sums`."""
        return self.sums_for(self.u, self.labels)

    def sums_for(self, u: Tensor, targets: Tensor) -> NodeSums:
        """See :meth:`DatasetDerivatives.sums_for`; a point is the one of its label that is closest to it."""
        x, index = unit(u), self.points.find(targets.to(self.labels.device))
        place = torch.empty_like(index)
        seen: list[tuple[Tensor, Candidates]] = []
        for rows, same in self.points.groups(index):
            place[rows] = self._places(x[rows], index[rows], same)
            seen.append((rows, same))
        seen.append((torch.arange(len(x), device=x.device), self.points.bank))
        degree, neighbors = x.new_zeros(len(x)), torch.zeros_like(x)
        vectors, bound = x.new_zeros(len(self.signs), *x.shape), x.new_zeros(len(x))
        holds = sum(len(rows) * len(others.u) for rows, others in seen) <= _HELD
        parts: list[tuple[Tensor, PairMoments]] = []
        for rows, others in seen:
            some = _Some(self, x[rows], index[rows], place[rows], others)
            held: list[_Weights] = []
            for start, stop in some.blocks(0, len(rows)):
                y, second, roots, cosine = some.pairs(start, stop)
                here = rows[start:stop]
                if not self.loss.pd_fix.second_only:
                    degree[here] += y.sum(1)
                    neighbors[here] += y @ others.u
                if second is None:
                    continue
                bound[here] += second.abs().sum(1)
                for r, root in enumerate(roots):
                    vectors[r, here] += root @ others.u
                if holds:
                    held.append((second, cosine))
            if not self.loss.linear and len(others.u):
                of_rows = vectors if others is self.points.bank else vectors[:0, rows]
                signs = self.signs[: len(of_rows)]
                weigh = some.keep(held) if holds else some.weigh
                parts.append((rows, PairMoments([MomentPart(0, len(rows), weigh, others.u)], signs, of_rows)))
        moments = None
        if not self.loss.linear:
            moments = SpreadMoments(parts, len(x), u.dtype, bound + vectors.square().sum((0, 2)))
        return check_sums(self.loss, NodeSums(degree, neighbors, moments, degree.new_zeros(())))

    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`CosineDerivatives.loss_and_cost`; the cost is what the loss is above the least that it can be."""
        del totals
        cost = (self._total - self._least).clamp(min=0)
        return (self.scale * self._total).to(self.u.dtype), (self.scale * cost).to(self.u.dtype)

    def class_weights(self) -> None:
        """See :meth:`DatasetDerivatives.class_weights`: weights depend on more than the classes."""

    def _look_at_all(self) -> None:
        """What there is to know of all anchors, from one look at their candidates."""
        loss, points, bank = self.loss, self.points, self.points.bank
        probe = [loss._statistics(*[points.weight.new_zeros(1, wide)] * 3).shape[1] for wide in (1, 2)]
        # What grows with the candidates has to be equally long for all anchors.
        width = points.widest() + len(bank.u) if probe[0] != probe[1] else 0
        numbers = probe[0] + (probe[1] - probe[0]) * max(0, width - 1)
        if self.n * numbers > _STATISTICS:
            _refuse(f"{type(loss).__name__} keeps {numbers} numbers of each of the {self.n} anchors")
        self.statistics = points.weight.new_zeros(self.n, numbers)
        self.kept = torch.zeros(self.n, dtype=torch.bool, device=self.u.device)
        self._total, self._least = points.weight.new_zeros(()), points.weight.new_zeros(())
        terms = 0.0
        for _, same in points.groups(points.index):
            u, index = torch.cat([same.u, bank.u]), torch.cat([same.index, bank.index])
            own = (torch.arange(len(index), device=u.device) < len(same.u)).unsqueeze(0)
            for some in torch.arange(len(same.u), device=u.device).split(max(1, _PAIRS // max(len(u), width))):
                equal = same.index[some].unsqueeze(1) == index
                positive = (equal & own).double()
                positive[torch.arange(len(some), device=u.device), some] = 0.0
                negative = (~equal & ~own) * (self.share * points.weight[same.index[some]].unsqueeze(1))
                pad = (0, width - len(u) if width else 0)
                cosine, positive, negative = (F.pad(part, pad) for part in (same.u[some] @ u.T, positive, negative))
                place = same.place[some]
                kept = row_numbers(loss, "_counts", loss._counts(positive, negative), len(some)) > 0
                counts = row_numbers(loss, "_counts_at", loss._counts_at(cosine, positive, negative), len(some))
                terms += float(counts.sum())
                self.statistics[place], self.kept[place] = loss._statistics(cosine, positive, negative), kept
                if bool(kept.any()):
                    values = loss._value(cosine[kept], positive[kept], negative[kept])
                    self._total += row_numbers(loss, "_value", values, int(kept.sum())).sum()
                    self._least += loss._least(positive[kept], negative[kept]).sum()
        self._anchors = int(self.kept.sum())
        self.skipped = self.n - self._anchors
        self.scale = loss._scale(terms, Sides.one_tower(self.n), self._anchors, as_data=True)

    def _places(self, x: Tensor, index: Tensor, same: Candidates) -> Tensor:
        """Which points of the data set some are: equal ones may be exchanged without a difference."""
        out = torch.empty_like(index)
        for some in torch.arange(len(x), device=x.device).split(max(1, _PAIRS // len(same.u))):
            cosine = (x[some] @ same.u.T).masked_fill(index[some].unsqueeze(1) != same.index, -torch.inf)
            out[some] = same.place[cosine.argmax(1)]
        return out

    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        """Refused, as is all that couples two points."""
        _refuse_pairs()

    def row_blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Refused, see :meth:`rows`."""
        _refuse_pairs()

    def matmul(self, x: Tensor) -> Tensor:
        """Refused, see :meth:`rows`."""
        _refuse_pairs()

    def second_matmul(self, t: Tensor) -> Tensor | None:
        """Refused, see :meth:`rows`."""
        _refuse_pairs()

    def roots(self, rows: slice, columns: slice) -> CrossRoots | None:
        """Refused, see :meth:`rows`."""
        _refuse_pairs()

    def between(self, u_a: Tensor, targets_a: Tensor, u_b: Tensor, targets_b: Tensor) -> tuple[Tensor, Tensor | None]:
        """Refused, see :meth:`rows`."""
        _refuse_pairs()

    def self_weights(self, targets: Tensor) -> Tensor:
        """Refused, see :meth:`rows`."""
        _refuse_pairs()

    def among(self, u: Tensor, targets: Tensor) -> CosineDerivatives:
        """Refused, see :meth:`rows`."""
        _refuse_pairs()


class _Some:
    """Points of a batch and candidates that they share.

    Args:
        source: Derivatives of the data set.
        x: Unit embeddings, shape (B, D).
        index: Numbers of their classes, shape (B,).
        place: Their places among all points, shape (B,).
        others: The candidates.
    """

    def __init__(
        self, source: SampledRowDerivatives, x: Tensor, index: Tensor, place: Tensor, others: Candidates
    ) -> None:
        self.source, self.x, self.index, self.place, self.others = source, x, index, place, others

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Ranges of the points, of a bounded number of pairs."""
        step = max(1, _PAIRS // max(1, len(self.others.u)))
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    def pairs(self, start: int, stop: int) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...], Tensor]:
        """``y``, second derivatives, roots of the points as anchors, and cosines of points ``start..stop``.

        Returns:
            Each (stop - start, C), scaled; second derivatives and roots are none for a linear loss.
        """
        source, others = self.source, self.others
        loss, points = source.loss, source.points
        place, index = self.place[start:stop], self.index[start:stop]
        cosine = self.x[start:stop] @ others.u.T
        equal = index.unsqueeze(1) == others.index
        nothing = torch.zeros_like(cosine)
        if others.positives:
            related = (equal & (place.unsqueeze(1) != others.place)).double()
            times = points.weight.new_ones(len(index), 1)
            as_anchor, as_candidate = (related, nothing), (related.T, nothing.T)
        else:
            related = source.share * (~equal).double()
            times = points.weight[index].unsqueeze(1)
            as_anchor, as_candidate = (nothing, times * related), (nothing.T, related.T)
        mine = row_terms(loss, cosine, *as_anchor, source.statistics[place], source.kept[place])
        theirs = self._of_anchors(cosine.T, *as_candidate, points.in_bank[place])
        y = -source.scale * (mine.first + times * theirs.first.T)
        if mine.second is None or theirs.second is None:
            return y, None, (), cosine
        own = theirs.second
        for sign, root in zip(source.signs, theirs.roots, strict=True):
            own = torch.addcmul(own, root, root, value=float(sign))
        second = source.scale * (mine.second + times * own.T)
        return y, second, tuple(source.scale**0.5 * root for root in mine.roots), cosine

    def _of_anchors(self, cosine: Tensor, positive: Tensor, negative: Tensor, in_bank: Tensor) -> RowTerms:
        """Derivatives of the candidates as anchors in their cosines with the points, each (C, B), not scaled."""
        source, others = self.source, self.others
        points, statistics, kept = source.points, source.statistics[others.place], source.kept[others.place]
        if not others.positives:
            # A point of the bank is in the row already, as often as it stands for others.
            missing = negative * (1 - in_bank * points.weight[others.index].unsqueeze(1))
            size = (points.sizes[others.index] - 1).unsqueeze(1)
            joined = joined_statistics(source.loss, statistics, cosine, negative, missing, size)
            if joined is not None:
                flat = [part.reshape(-1, 1) for part in (cosine, positive, negative)]
                each = kept.repeat_interleave(cosine.shape[1])
                terms = row_terms(source.loss, flat[0], flat[1], flat[2], joined.flatten(0, 1), each)
                second = None if terms.second is None else terms.second.view_as(cosine)
                roots = tuple(root.view_as(cosine) for root in terms.roots)
                return type(terms)(terms.first.view_as(cosine), second, roots)
        return row_terms(source.loss, cosine, positive, negative, statistics, kept)

    def weigh(self, start: int, stop: int) -> _Weights:
        """Second derivatives of points ``start..stop`` and the cosines of the same pairs."""
        found: list[_Weights] = []
        for block in self.blocks(start, stop):
            _, second, _, cosine = self.pairs(*block)
            if second is None:
                msg = "a linear loss has no moments"
                raise RuntimeError(msg)
            found.append((second, cosine))
        return _joined(found)

    def keep(self, held: list[_Weights]) -> _Held:
        """The same as :meth:`weigh`, computed already."""
        return _Held(*_joined(held))


class _Held:
    """Second derivatives and cosines that are kept."""

    def __init__(self, second: Tensor, cosine: Tensor) -> None:
        self.second, self.cosine = second, cosine

    def __call__(self, start: int, stop: int) -> _Weights:
        return self.second[start:stop], self.cosine[start:stop]


def _joined(parts: list[_Weights]) -> _Weights:
    if len(parts) == 1:
        return parts[0]
    seconds, cosines = zip(*parts, strict=True)
    return torch.cat(seconds), torch.cat(cosines)


def _refuse_pairs() -> NoReturn:
    _refuse("blocks between two points are asked for")


def _refuse(why: str) -> NoReturn:
    msg = (
        f"negative_samples: {why}, which a sample of the negatives does not give. Use pd_fix='psd_parts', 'psd', "
        "'fixed' or 'ggn_fixed', or negative_samples=None, which takes all negatives."
    )
    raise UnsupportedError(msg)
