"""The derivatives of a loss of anchors in all cosines, never held whole beyond a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contrastive_curvature.hessian.cross import CrossRoots, RootSide
from contrastive_curvature.hessian.derivatives import CosineDerivatives, NodeSums, Totals
from contrastive_curvature.hessian.moments import MomentPart, PairMoments
from contrastive_curvature.losses.sides import Side, Sides
from contrastive_curvature.pairs.relation import Relation

if TYPE_CHECKING:
    from contrastive_curvature.losses.rows import RowLoss, RowTerms

__all__ = ["RowDerivatives"]

_HELD_ELEMENTS = 2**24
"""Pairs whose derivatives are kept instead of being computed again."""


@dataclass
class _Rows:
    """What is known of the anchors of one side.

    Args:
        side: Which points they are.
        statistics: See :meth:`RowLoss._statistics`, shape (A, K).
        kept: Whether an anchor has a term, shape (A,).
        top: Its candidate of the largest weight, shape (A,).
        rest: ``sum_j q_rj`` over all others, shape (R, A).
        held: First and second derivatives and roots of all pairs, scaled, (A, M) each, where these are few.
        cosine: Of the same pairs.
    """

    side: Side
    statistics: Tensor
    kept: Tensor
    top: Tensor
    rest: Tensor
    held: RowTerms | None = None
    cosine: Tensor | None = None


class RowDerivatives(CosineDerivatives):
    """``y``, ``c`` and the roots of a :class:`~contrastive_curvature.losses.rows.RowLoss`.

    A pair of points has the weight ``y_ij = -(dL/ds_ij + dL/ds_ji)``, and ``c`` likewise.

    Args:
        loss: The loss.
        relation: Which pairs are positive and negative.
        u: Unit embeddings, shape (N, D).
        sides: Which points are anchors, and of which candidates.
        as_data: See :meth:`RowLoss.derivatives`.

    Attributes:
        anchors: Number of anchors that have a term.
        skipped: Number of anchors that have none.
    """

    def __init__(self, loss: RowLoss, relation: Relation, u: Tensor, sides: Sides, *, as_data: bool = False) -> None:
        self.loss, self.relation, self.u, self.sides = loss, relation, u, sides
        self.n = len(u)
        self.fix = loss.pd_fix
        self._terms_counted = 0.0
        self._values: tuple[Tensor, Tensor] | None = None
        self._moments: PairMoments | None = None
        self.signs = u.new_tensor(loss.root_signs)
        self._rows = [self._look_at(side) for side in sides]
        self.anchors = sum(int(rows.kept.sum()) for rows in self._rows)
        self.skipped = sum(rows.kept.numel() for rows in self._rows) - self.anchors
        self.scale = loss._scale(self._terms_counted, sides, self.anchors, as_data=as_data)
        for rows in self._rows:
            rows.held = None if rows.held is None else _scaled(rows.held, self.scale)

    def node_sums(self) -> NodeSums:
        """See :meth:`CosineDerivatives.node_sums`."""
        degree, neighbors = self.u.new_zeros(self.n), torch.zeros_like(self.u)
        loss, dim = self.loss, self.u.shape[1]
        shifted = loss.shift_invariant and not loss.linear
        many = len(self.signs) + (2 if shifted else 0)
        vectors = self.u.new_zeros(many, self.n, dim)
        # Which pairs attract shows only once both directions of a pair are together.
        summed = not (self.fix.second_only or self.fix.attracting_only)
        for rows in self._rows:
            candidates = self.u[rows.side.candidates]
            for start, stop in rows.side.row_blocks(3):
                terms = self._of(rows, start, stop)
                here = slice(rows.side.anchors.start + start, rows.side.anchors.start + stop)
                if summed:
                    y = -terms.first
                    degree[here] += y.sum(1)
                    degree[rows.side.candidates] += y.sum(0)
                    neighbors[here] += y @ candidates
                    neighbors[rows.side.candidates] += y.T @ self.u[here]
                if terms.second is not None:
                    self._add_vectors(vectors[:, here], terms, candidates, rows.top[start:stop])
        if self.fix.attracting_only:
            degree, neighbors = self._attracting_sums()
        moments = None
        if not loss.linear:
            signs = torch.cat([self.signs, self.u.new_tensor([1.0, -1.0])]) if shifted else self.signs
            moments = self._moments = PairMoments(list(self._parts()), signs, vectors)
        sums = NodeSums(degree, neighbors, moments, degree.new_zeros((), dtype=torch.float64))
        return sums.checked(type(loss).__name__)

    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        """See :meth:`CosineDerivatives.rows`."""
        first, last, _ = columns.indices(self.n)
        y = self.u.new_zeros(stop - start, max(0, last - first))
        c = None if self.loss.linear else torch.zeros_like(y)
        for rows, forward, ours, theirs in self._overlaps(slice(start, stop), slice(first, last)):
            terms = self._of(rows, *_ends(ours), theirs) if forward else self._of(rows, *_ends(theirs), ours)
            side = rows.side
            place = (
                (_moved(ours, side.anchors.start - start), _moved(theirs, side.candidates.start - first))
                if forward
                else (_moved(ours, side.candidates.start - start), _moved(theirs, side.anchors.start - first))
            )
            y[place] -= terms.first if forward else terms.first.T
            if c is not None and terms.second is not None:
                c[place] += terms.second if forward else terms.second.T
        if self.fix.second_only:
            y.zero_()
        return (y.clamp_(min=0) if self.fix.attracting_only else y), c

    def matmul(self, x: Tensor) -> Tensor:
        """See :meth:`CosineDerivatives.matmul`."""
        return torch.zeros_like(x) if self.fix.second_only else super().matmul(x)

    def second_matmul(self, t: Tensor) -> Tensor | None:
        """See :meth:`CosineDerivatives.second_matmul`."""
        if self.loss.linear:
            return None
        out, moments = torch.zeros_like(t), torch.zeros_like(t)
        for rows in self._rows:
            chosen = rows.side.candidates
            candidates, moved = self.u[chosen], t[chosen]
            for start, stop in rows.side.row_blocks(3):
                here = slice(rows.side.anchors.start + start, rows.side.anchors.start + stop)
                terms = self._of(rows, start, stop)
                for k in range(t.shape[2]):
                    of_anchor, of_candidate = t[here, :, k] @ candidates.T, self.u[here] @ moved[..., k].T
                    curved = self._curved(terms, of_anchor + of_candidate)
                    out[here, :, k] += curved @ candidates
                    out[chosen, :, k] += curved.T @ self.u[here]
                    # Less what is between a point and itself: both ends of a pair alone, and the roots of one end.
                    moments[here, :, k] += self._curved(terms, of_anchor) @ candidates
                    own = terms.second if terms.second is not None else torch.zeros_like(of_candidate)
                    for sign, root in zip(self.signs, terms.roots, strict=True):
                        own = own + sign * root.square()
                    moments[chosen, :, k] += (own * of_candidate).T @ self.u[here]
        return out - moments

    def roots(self, rows: slice, columns: slice) -> CrossRoots | None:
        """See :meth:`CosineDerivatives.roots`."""
        if not len(self.signs):
            return None
        ends = [slice(*chosen.indices(self.n)[:2]) for chosen in (rows, columns)]
        sides = [self._root_side(chosen) for chosen in ends]
        signs = torch.cat([self.signs.repeat_interleave(side.shape[0]) for side in self.sides])
        low, high = max(ends[0].start, ends[1].start), min(ends[0].stop, ends[1].stop)
        same = torch.arange(low, max(low, high), device=self.u.device)
        return CrossRoots(signs, sides[0], sides[1], same - ends[0].start, same - ends[1].start)

    def release(self) -> None:
        """Forget the numbers of all pairs of points; they are computed again when they are asked for."""
        for rows in self._rows:
            rows.held = rows.cosine = None
        if self._moments is not None:
            self._moments.release()

    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`CosineDerivatives.loss_and_cost`; the cost is what the loss is above the least that it can be."""
        del totals
        if self._values is None:
            total, least = torch.zeros(2, dtype=torch.float64, device=self.u.device)
            for rows in self._rows:
                for start, stop in rows.side.row_blocks():
                    kept = rows.kept[start:stop]
                    if not bool(kept.any()):
                        continue
                    related = rows.side.related(self.relation, start, stop, self.u.dtype)
                    positive, negative = (part[kept] for part in related)
                    cosine = self._cosine(rows, start, stop)[kept]
                    values = self.loss._checked("_value", cosine, positive, negative)
                    total = total + values.double().sum()
                    least = least + self.loss._least(positive, negative).double().sum()
            cost = (self.scale * (total - least)).clamp(min=0)
            self._values = (self.scale * total).to(self.u.dtype), cost.to(self.u.dtype)
        return self._values

    def _look_at(self, side: Side) -> _Rows:
        """What there is to know of the anchors of a side, from one look at all their candidates."""
        loss, (count, many) = self.loss, side.shape
        found: list[Tensor] = []
        kept = torch.zeros(count, dtype=torch.bool, device=self.u.device)
        top = torch.zeros(count, dtype=torch.int64, device=self.u.device)
        rest = self.u.new_zeros(len(self.signs), count)
        held: list[RowTerms] = []
        cosines: list[Tensor] = []
        holds = count * many <= _HELD_ELEMENTS
        for start, stop in side.row_blocks(3):
            positive, negative = side.related(self.relation, start, stop, self.u.dtype)
            mine = loss._has_terms(positive, negative)
            kept[start:stop] = mine
            cosine = self.u[side.anchors][start:stop] @ self.u[side.candidates].T
            self._terms_counted += float(loss._checked("_counts_at", cosine, positive, negative).sum())
            statistics = loss._statistics(cosine, positive, negative)
            found.append(statistics)
            terms = loss._checked_terms(cosine, positive, negative, statistics, mine)
            if terms.second is not None and many:
                top[start:stop] = terms.second.argmax(1)
                for r, root in enumerate(terms.roots):
                    rest[r, start:stop] = root.scatter(1, top[start:stop, None], 0.0).sum(1)
            if holds:
                held.append(terms)
                cosines.append(cosine)
        statistics = torch.cat(found) if found else self.u.new_zeros(0, 0)
        whole = _joined(held) if holds and held else None
        known = None if whole is None else cosines[0] if len(cosines) == 1 else torch.cat(cosines)
        return _Rows(side, statistics, kept, top, rest, whole, known)

    def _cosine(self, rows: _Rows, start: int, stop: int, columns: slice | None = None) -> Tensor:
        """Cosines of anchors ``start..stop`` of a side with some of its candidates."""
        if rows.cosine is not None:
            return rows.cosine[start:stop] if columns is None else rows.cosine[start:stop, columns]
        candidates = self.u[rows.side.candidates]
        return self.u[rows.side.anchors][start:stop] @ (candidates if columns is None else candidates[columns]).T

    def _of(self, rows: _Rows, start: int, stop: int, columns: slice | None = None) -> RowTerms:
        """Derivatives of the loss, scaled, for anchors ``start..stop`` of a side and some of its candidates."""
        if rows.held is not None:
            chosen = slice(None) if columns is None else columns
            second = None if rows.held.second is None else rows.held.second[start:stop, chosen]
            roots = tuple(root[start:stop, chosen] for root in rows.held.roots)
            return type(rows.held)(rows.held.first[start:stop, chosen], second, roots)
        positive, negative = rows.side.related(self.relation, start, stop, self.u.dtype, columns)
        cosine = self._cosine(rows, start, stop, columns)
        statistics, kept = rows.statistics[start:stop], rows.kept[start:stop]
        return _scaled(self.loss._checked_terms(cosine, positive, negative, statistics, kept), self.scale)

    def _attracting_sums(self) -> tuple[Tensor, Tensor]:
        """Sums over pairs that attract, both directions of a pair together."""
        degree, neighbors = self.u.new_zeros(self.n), torch.zeros_like(self.u)
        for rows, y, _ in self.row_blocks():
            degree[rows], neighbors[rows] = y.sum(1), y @ self.u
        return degree, neighbors

    def _add_vectors(self, out: Tensor, terms: RowTerms, candidates: Tensor, top: Tensor) -> None:
        """Vectors of the moments of anchors, shape (R, B, D): their roots, and those of another origin.

        Where a shift of all cosines changes nothing, the candidates may be counted from any point. From the one of the
        largest weight, a concentrated softmax loses no digits: its variance is small, not a difference of large
        numbers.
        """
        if terms.second is None:
            return
        if not self.loss.shift_invariant:
            for r, root in enumerate(terms.roots):
                out[r] += root @ candidates
            return
        place, origin = top.unsqueeze(1), candidates[top]
        others = terms.second.scatter(1, place, 0.0)
        weight, mean = others.sum(1, keepdim=True), others @ candidates
        for r, root in enumerate(terms.roots):
            few = root.scatter(1, place, 0.0)
            out[r] += few @ candidates - few.sum(1, keepdim=True) * origin
        size = weight.clamp(min=0).sqrt()
        safe = torch.where(size > 0, size, torch.ones_like(size))
        out[-2] += torch.where(size > 0, size * origin - mean / safe, 0.0)
        out[-1] += torch.where(size > 0, mean / safe, 0.0)

    def _parts(self) -> Iterator[MomentPart]:
        """Weights of the moments for every range of points that has the same candidates."""
        ranges: dict[tuple[int, int], Tensor] = {}
        for rows in self._rows:
            for mine, other in ((rows.side.anchors, rows.side.candidates), (rows.side.candidates, rows.side.anchors)):
                ranges[mine.start, mine.stop] = self.u[other]
        for (start, stop), others in sorted(ranges.items(), key=lambda item: item[0]):
            yield MomentPart(start, stop, self._moment_weights, others)

    def _moment_weights(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Weights of the candidates of points ``start..stop``, as anchors and as candidates; and known cosines."""
        out: Tensor | None = None
        cosine: Tensor | None = None
        for rows in self._rows:
            anchors, candidates = rows.side.anchors, rows.side.candidates
            if anchors.start <= start and stop <= anchors.stop:
                ours = start - anchors.start, stop - anchors.start
                part = self._as_batch(rows, *ours)
                out = part if out is None else out + part
                cosine = rows.cosine if rows.cosine is None else rows.cosine[slice(*ours)]
            if candidates.start <= start and stop <= candidates.stop:
                part = self._as_candidates(rows, slice(start - candidates.start, stop - candidates.start))
                out = part if out is None else out + part
        if out is None:
            msg = f"no side has the points {start}..{stop}"
            raise RuntimeError(msg)
        return out, cosine

    def _as_batch(self, rows: _Rows, start: int, stop: int) -> Tensor:
        second = self._of(rows, start, stop).second
        if second is None:
            msg = "a linear loss has no moments"
            raise RuntimeError(msg)
        # The candidate of the largest weight is the origin of the others.
        return second.scatter(1, rows.top[start:stop, None], 0.0) if self.loss.shift_invariant else second

    def _as_candidates(self, rows: _Rows, columns: slice) -> Tensor:
        terms = self._of(rows, 0, rows.side.shape[0], columns)
        if terms.second is None:
            msg = "a linear loss has no moments"
            raise RuntimeError(msg)
        out = terms.second
        for sign, root in zip(self.signs, terms.roots, strict=True):
            out = torch.addcmul(out, root, root, value=float(sign))
        if self.loss.shift_invariant and len(self.signs):
            # Rows of second derivatives sum to zero: where one weight is nearly all, it is minus those of the others.
            column = rows.top - columns.start
            inside = (column >= 0) & (column < columns.stop - columns.start)
            anchor, at = inside.nonzero().flatten(), column[inside]
            exact = sum(
                -sign * root[anchor, at] * self.scale**0.5 * rows.rest[r, anchor]
                for r, (sign, root) in enumerate(zip(self.signs, terms.roots, strict=True))
            )
            out = out.index_put((anchor, at), torch.as_tensor(exact))
        return out.T

    def _curved(self, terms: RowTerms, change: Tensor) -> Tensor:
        """Second derivatives of rows times changes of their cosines, each (B, M)."""
        out = change * terms.second if terms.second is not None else torch.zeros_like(change)
        for sign, root in zip(self.signs, terms.roots, strict=True):
            out = out + sign * root * (root * change).sum(1, keepdim=True)
        return out

    def _root_side(self, points: slice) -> RootSide:
        """The vectors of all anchors, at some of the points."""
        weights, anchors = [], []
        vector, place, own = [], [], []
        offset = 0
        for rows in self._rows:
            side = rows.side
            count = side.shape[0]
            inside = _overlap(points, side.candidates)
            found = self._of(rows, 0, count, _moved(inside, -side.candidates.start))
            here = _overlap(points, side.anchors)
            mine = self._of(rows, *_ends(_moved(here, -side.anchors.start)))
            for root, of_mine in zip(found.roots, mine.roots, strict=True):
                all_points = self.u.new_zeros(count, points.stop - points.start)
                all_points[:, _moved(inside, -points.start)] = root
                weights.append(all_points)
                anchors.append(self.u[side.anchors])
                numbers = torch.arange(here.start, here.stop, device=self.u.device)
                vector.append(offset + numbers - side.anchors.start)
                place.append(numbers - points.start)
                own.append(of_mine @ self.u[side.candidates])
                offset += count
        return RootSide(torch.cat(anchors), torch.cat(weights), (torch.cat(vector), torch.cat(place), torch.cat(own)))

    def _overlaps(self, rows: slice, columns: slice) -> Iterator[tuple[_Rows, bool, slice, slice]]:
        """Where a block of pairs meets the sides: (side, whether the rows are its anchors, rows, columns)."""
        for known in self._rows:
            side = known.side
            for forward, mine, other in ((True, side.anchors, side.candidates), (False, side.candidates, side.anchors)):
                ours, theirs = _overlap(rows, mine), _overlap(columns, other)
                if ours.stop > ours.start and theirs.stop > theirs.start:
                    yield known, forward, _moved(ours, -mine.start), _moved(theirs, -other.start)


def _overlap(a: slice, b: slice) -> slice:
    start = max(a.start, b.start)
    return slice(start, max(start, min(a.stop, b.stop)))


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _ends(part: slice) -> tuple[int, int]:
    return part.start, part.stop


def _joined(parts: list[RowTerms]) -> RowTerms:
    if len(parts) == 1:
        return parts[0]
    seconds = [part.second for part in parts if part.second is not None]
    roots = tuple(torch.cat(column) for column in zip(*(part.roots for part in parts), strict=True))
    return type(parts[0])(torch.cat([part.first for part in parts]), torch.cat(seconds) if seconds else None, roots)


def _scaled(terms: RowTerms, scale: float) -> RowTerms:
    """Terms of a loss that is multiplied by a number."""
    if scale == 1:
        return terms
    second = None if terms.second is None else scale * terms.second
    return type(terms)(scale * terms.first, second, tuple(scale**0.5 * root for root in terms.roots))
