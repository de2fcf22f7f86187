"""The derivatives of a loss of anchors in all cosines, never held whole beyond a batch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial, reduce
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature.hessian.cross import CrossRoots, RootSide
from contrastive_curvature.hessian.derivatives import CosineDerivatives, NodeSums, Totals
from contrastive_curvature.hessian.moments import MomentPart, PairMoments
from contrastive_curvature.losses.sides import Side, Sides, moved
from contrastive_curvature.pairs.relation import Relation

if TYPE_CHECKING:
    from contrastive_curvature.losses.rows import RowLoss, RowTerms


_HELD_ELEMENTS = 2**24
"""Pairs whose derivatives are kept instead of being computed again."""


class RowDerivatives(CosineDerivatives):
    """``y``, ``c`` and the roots of a :class:`~contrastive_curvature.losses.rows.RowLoss`.

    A pair of points has the weight ``y_ij = -(dL/ds_ij + dL/ds_ji)``, and ``c`` likewise.

    Args:
        loss: The loss.
        relation: Which pairs are positive and negative.
        u: Unit embeddings, shape (N, D).
        sides: Which points are anchors, and of which candidates.
        as_data: See :meth:`RowLoss.derivatives`.
    """

    def __init__(self, loss: RowLoss, relation: Relation, u: Tensor, sides: Sides, *, as_data: bool = False) -> None:
        self.loss, self.u, self.n, self.fix = loss, u, len(u), loss.pd_fix
        self.signs = u.new_tensor(loss.root_signs)
        self._values: tuple[Tensor, Tensor] | None = None
        self._moment_parts: list[MomentPart] = []
        self._sides = [_Anchors(loss, relation, u, side) for side in sides]
        self.anchors = sum(int(known.kept.sum()) for known in self._sides)
        self.skipped = sum(known.kept.numel() for known in self._sides) - self.anchors
        terms = sum(known.count for known in self._sides)
        self.scale = loss._scale(terms, sides, self.anchors, as_data=as_data)
        for known in self._sides:
            known.rescale(self.scale)

    @override
    def node_sums(self) -> NodeSums:
        degree, neighbors = self.u.new_zeros(self.n), torch.zeros_like(self.u)
        shifted = self.loss.shift_invariant and not self.loss.linear
        signs = torch.cat([self.signs, self.u.new_tensor([1.0, -1.0])]) if shifted else self.signs
        vectors, bound = self.u.new_zeros(len(signs), *self.u.shape), self.u.new_zeros(self.n)
        # Which pairs attract shows only once both directions of a pair are together.
        summed = not (self.fix.second_only or self.fix.attracting_only)
        for known in self._sides:
            theirs = known.side.candidates
            for here in known.side.row_blocks(3):
                terms = known.at(here)
                if summed:
                    y = -terms.first
                    degree[here] += y.sum(1)
                    degree[theirs] += y.sum(0)
                    neighbors[here] += y @ self.u[theirs]
                    neighbors[theirs] += y.T @ self.u[here]
                if terms.second is not None:
                    for out, vector in zip(vectors, known.vectors(here, terms), strict=True):
                        out[here] += vector
                    own = self._own_second(terms)
                    bound[here] += torch.linalg.vector_norm(known.without_top(here, terms), ord=1, dim=1)
                    bound[theirs] += torch.linalg.vector_norm(own, ord=1, dim=0)
        if self.fix.attracting_only:
            for rows, y, _ in self.row_blocks(3):
                degree[rows], neighbors[rows] = y.sum(1), y @ self.u
        moments = None
        if not self.loss.linear:
            self._moment_parts = list(self._parts())
            moments = PairMoments(self._moment_parts, signs, vectors, bound + vectors.square().sum((0, 2)))
        value = degree.new_zeros((), dtype=torch.float64)
        return NodeSums(degree, neighbors, moments, value).checked(type(self.loss).__name__)

    @override
    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        first, last, _ = columns.indices(self.n)
        y = self.u.new_zeros(stop - start, max(0, last - first))
        c = None if self.loss.linear else torch.zeros_like(y)
        block = slice(start, stop), slice(first, last)
        for known in self._sides:
            for turned in (False, True):
                anchors = _overlap(block[turned], known.side.anchors)
                candidates = _overlap(block[not turned], known.side.candidates)
                if anchors.start == anchors.stop or candidates.start == candidates.stop:
                    continue
                terms = known.at(anchors, candidates)
                ours, theirs = (candidates, anchors) if turned else (anchors, candidates)
                place = moved(ours, -start), moved(theirs, -first)
                y[place] -= terms.first.T if turned else terms.first
                if c is not None and terms.second is not None:
                    c[place] += terms.second.T if turned else terms.second
        if self.fix.second_only:
            y.zero_()
        return (y.clamp_(min=0) if self.fix.attracting_only else y), c

    @override
    def matmul(self, x: Tensor) -> Tensor:
        if self.fix.attracting_only:
            # Which pairs attract shows only once both directions of a pair are together.
            return super().matmul(x)
        out = torch.zeros_like(x)
        for known in () if self.fix.second_only else self._sides:
            theirs = known.side.candidates
            for here in known.side.row_blocks(3):
                first = known.at(here).first
                out[here] -= first @ x[theirs]
                out[theirs] -= first.T @ x[here]
        return out

    @override
    def second_matmul(self, t: Tensor) -> Tensor | None:
        if self.loss.linear:
            return None
        out = torch.zeros_like(t)
        for known in self._sides:
            theirs = known.side.candidates
            candidates, changes = self.u[theirs], t[theirs]
            for here in known.side.row_blocks(3):
                terms, anchors = known.at(here), self.u[here]
                second = cast("Tensor", terms.second)
                squares = torch.zeros_like(second)
                for sign, root in zip(self.signs, terms.roots, strict=True):
                    squares.addcmul_(root, root, value=float(sign))
                # What the change of a point itself does to its own row, and to its own column, is left out.
                for k in range(t.shape[2]):
                    of_anchor, of_candidate = t[here, :, k] @ candidates.T, anchors @ changes[..., k].T
                    out[here, :, k] += (second * of_candidate) @ candidates
                    at_candidates = of_anchor.mul_(second).addcmul_(squares, of_candidate, value=-1)
                    out[theirs, :, k] += at_candidates.T @ anchors
                for sign, root in zip(self.signs, terms.roots, strict=True):
                    own = root @ candidates
                    along_anchor = torch.einsum("bd,bdk->bk", own, t[here])
                    along_candidates = torch.einsum("bd,bdk->bk", anchors, (root @ changes.flatten(1)).view_as(t[here]))
                    out[here] += sign * torch.einsum("bk,bd->bdk", along_candidates, own)
                    outer = torch.einsum("bk,bd->bdk", sign * (along_anchor + along_candidates), anchors)
                    out[theirs] += (root.T @ outer.flatten(1)).view_as(changes)
        return out

    @override
    def roots(self, rows: slice, columns: slice) -> CrossRoots | None:
        if not len(self.signs):
            return None
        ends = [slice(*chosen.indices(self.n)[:2]) for chosen in (rows, columns)]
        sides = [self._root_side(chosen) for chosen in ends]
        signs = torch.cat([self.signs.repeat_interleave(known.side.shape[0]) for known in self._sides])
        both = _overlap(*ends)
        same = torch.arange(both.start, both.stop, device=self.u.device)
        return CrossRoots(signs, sides[0], sides[1], same - ends[0].start, same - ends[1].start)

    def release(self) -> None:
        """Forget the numbers of all pairs of points; they are computed again when they are asked for."""
        for known in self._sides:
            known.held = known.cosines = None
        for part in self._moment_parts:
            part.last = None

    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`CosineDerivatives.loss_and_cost`; the cost is the loss above the least that it can be."""
        if self._values is None:
            total, cost = torch.zeros(2, dtype=torch.float64, device=self.u.device)
            for known in self._sides:
                for here in known.side.row_blocks(3):
                    kept = known.kept[known.local(here)]
                    if bool(kept.any()):
                        given = [part[kept] for part in known.given(here)]
                        value = self.loss._checked("_value", *given)
                        total = total + value.double().sum()
                        cost = cost + self.loss._checked("_cost", value, *given).double().sum()
            self._values = (self.scale * total).to(self.u.dtype), (self.scale * cost).to(self.u.dtype)
        return self._values

    def _parts(self) -> Iterator[MomentPart]:
        """Iterate over the weights of the moments for every range of points that has the same candidates."""
        ranges: dict[tuple[int, int], tuple[slice, slice]] = {}
        for side in (known.side for known in self._sides):
            for mine, other in ((side.anchors, side.candidates), (side.candidates, side.anchors)):
                ranges[mine.start, mine.stop] = mine, other
        for (start, stop), (mine, other) in sorted(ranges.items(), key=lambda item: item[0]):
            points = torch.arange(start, stop, device=self.u.device)
            yield MomentPart(points, partial(self._moment_weights, mine), self.u[other], first=start)

    def _moment_weights(self, points: slice, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Return the weights of the candidates of points ``start..stop``, in both directions; and known cosines."""
        here, cosine = slice(start, stop), None
        found: list[Tensor] = []
        for known in self._sides:
            if known.side.anchors == points:
                found.append(known.without_top(here, known.at(here)))
                cosine = None if known.cosines is None else known.cosines[known.local(here)]
            if known.side.candidates == points:
                found.append(self._as_candidates(known, here))
        return reduce(torch.add, found), cosine

    def _as_candidates(self, known: _Anchors, candidates: slice) -> Tensor:
        terms = known.at(known.side.anchors, candidates)
        out = self._own_second(terms)
        if self.loss.shift_invariant and len(self.signs):
            # Rows of second derivatives sum to zero: where one weight is nearly all, it is minus those of the others.
            column = known.top + known.side.candidates.start - candidates.start
            inside = (column >= 0) & (column < candidates.stop - candidates.start)
            anchor, at = inside.nonzero().flatten(), column[inside]
            exact = sum(
                -sign * root[anchor, at] * self.scale**0.5 * rest[anchor]
                for sign, root, rest in zip(self.signs, terms.roots, known.rest, strict=True)
            )
            out = out.index_put((anchor, at), torch.as_tensor(exact))
        return out.T

    def _own_second(self, terms: RowTerms) -> Tensor:
        """Return the second derivatives of each cosine alone, the squares of the roots included."""
        out = cast("Tensor", terms.second)
        for sign, root in zip(self.signs, terms.roots, strict=True):
            out = torch.addcmul(out, root, root, value=float(sign))
        return out

    def _root_side(self, points: slice) -> RootSide:
        """Return the vectors of all anchors, at some of the points."""
        weights, anchors, offset = [], [], 0
        vector, place, own = [], [], []
        for known in self._sides:
            side = known.side
            inside, here = _overlap(points, side.candidates), _overlap(points, side.anchors)
            found, mine = known.at(side.anchors, inside), known.at(here)
            for root, of_mine in zip(found.roots, mine.roots, strict=True):
                all_points = self.u.new_zeros(side.shape[0], points.stop - points.start)
                all_points[:, moved(inside, -points.start)] = root
                weights.append(all_points)
                anchors.append(self.u[side.anchors])
                numbers = torch.arange(here.start, here.stop, device=self.u.device)
                vector.append(offset + numbers - side.anchors.start)
                place.append(numbers - points.start)
                own.append(of_mine @ self.u[side.candidates])
                offset += side.shape[0]
        return RootSide(torch.cat(anchors), torch.cat(weights), (torch.cat(vector), torch.cat(place), torch.cat(own)))


class _Anchors:
    """The A anchors of one side, from one look at all their candidates; ranges of points are among all N.

    Attributes:
        count: Number of terms of the loss.
        statistics: See :meth:`RowLoss._statistics`, shape (A, K).
        kept: Whether an anchor has a term, shape (A,).
        top: Its candidate of the largest weight, shape (A,).
        rest: ``sum_j q_rj`` over all others, shape (R, A).
        held: First and second derivatives and roots of all pairs, scaled, (A, M) each, where these are few.
        cosines: Of the same pairs.
    """

    def __init__(self, loss: RowLoss, relation: Relation, u: Tensor, side: Side) -> None:
        self.loss, self.relation, self.u, self.side = loss, relation, u, side
        count, many = side.shape
        self.count, self.scale = 0.0, 1.0
        self.held: RowTerms | None = None
        self.cosines: Tensor | None = None
        self.kept = torch.zeros(count, dtype=torch.bool, device=u.device)
        self.top = torch.zeros(count, dtype=torch.int64, device=u.device)
        self.rest = u.new_zeros(len(loss.root_signs), count)
        found: list[tuple[Tensor, RowTerms]] = []
        statistics = [u.new_zeros(0, 0)] if not count else []
        for here in side.row_blocks(3):
            rows, given = self.local(here), self.given(here)
            self.kept[rows] = loss._checked("_counts", *given[1:]) > 0
            self.count += float(loss._checked("_counts_at", *given).sum())
            statistics.append(loss._statistics(*given))
            terms = loss._checked_terms(*given, statistics[-1], self.kept[rows])
            if terms.second is not None and many:
                self.top[rows] = terms.second.argmax(1)
                for rest, root in zip(self.rest, terms.roots, strict=True):
                    rest[rows] = root.scatter(1, self.top[rows, None], 0.0).sum(1)
            if count * many <= _HELD_ELEMENTS:
                found.append((given[0], terms))
        self.statistics = torch.cat(statistics)
        if found:
            self.cosines = _cat([cosine for cosine, _ in found])
            self.held = _joined([terms for _, terms in found])

    def local(self, anchors: slice) -> slice:
        """Return a range of the anchors, counted from the first one of this side."""
        return moved(anchors, -self.side.anchors.start)

    def given(self, anchors: slice, candidates: slice | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return cosines, positives and negatives of some anchors and some or all of their candidates."""
        chosen = self.side.candidates if candidates is None else candidates
        positive, negative = (mask.to(self.u) for mask in self.relation.rows(anchors.start, anchors.stop, chosen))
        if self.cosines is None:
            return self.u[anchors] @ self.u[chosen].T, positive, negative
        return self.cosines[self.local(anchors), moved(chosen, -self.side.candidates.start)], positive, negative

    def at(self, anchors: slice, candidates: slice | None = None) -> RowTerms:
        """Return the derivatives of the loss, scaled, for some anchors and some or all of their candidates."""
        rows = self.local(anchors)
        if self.held is None:
            given = self.given(anchors, candidates)
            return _scaled(self.loss._checked_terms(*given, self.statistics[rows], self.kept[rows]), self.scale)
        columns = moved(self.side.candidates if candidates is None else candidates, -self.side.candidates.start)
        return self.held.map(lambda part: part[rows, columns])

    def rescale(self, scale: float) -> None:
        """Multiply the loss by a number."""
        self.scale, self.held = scale, None if self.held is None else _scaled(self.held, scale)

    def without_top(self, anchors: slice, terms: RowTerms) -> Tensor:
        """Return the weights ``c`` (B, M) of the candidates, but for one that is the origin of the others."""
        second = cast("Tensor", terms.second)
        return second.scatter(1, self.top[self.local(anchors), None], 0.0) if self.loss.shift_invariant else second

    def vectors(self, anchors: slice, terms: RowTerms) -> list[Tensor]:
        """Return the vectors of the moments of anchors, (B, D) each: their roots, and those of another origin.

        Where a shift of all cosines changes nothing, the candidates may be counted from any point. From the one of the
        largest weight, a concentrated softmax loses no digits: its variance is small, not a difference of large
        numbers.
        """
        candidates = self.u[self.side.candidates]
        if not self.loss.shift_invariant:
            return [root @ candidates for root in terms.roots]
        top = self.top[self.local(anchors)]
        place, origin = top.unsqueeze(1), candidates[top]
        few = [root.scatter(1, place, 0.0) for root in terms.roots]
        out = [root @ candidates - root.sum(1, keepdim=True) * origin for root in few]
        others = self.without_top(anchors, terms)
        size, mean = others.sum(1, keepdim=True).clamp(min=0).sqrt(), others @ candidates
        safe = torch.where(size > 0, size, torch.ones_like(size))
        return [*out, torch.where(size > 0, size * origin - mean / safe, 0.0), torch.where(size > 0, mean / safe, 0.0)]


def _overlap(a: slice, b: slice) -> slice:
    start = max(a.start, b.start)
    return slice(start, max(start, min(a.stop, b.stop)))


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _joined(parts: list[RowTerms]) -> RowTerms:
    first, seconds, roots = zip(*parts, strict=True)
    second = None if seconds[0] is None else _cat(list(seconds))
    return type(parts[0])(_cat(list(first)), second, tuple(_cat(list(column)) for column in zip(*roots, strict=True)))


def _scaled(terms: RowTerms, scale: float) -> RowTerms:
    """Return the terms of a loss that is multiplied by a number."""
    if scale == 1:
        return terms
    second = None if terms.second is None else scale * terms.second
    return type(terms)(scale * terms.first, second, tuple(scale**0.5 * root for root in terms.roots))
