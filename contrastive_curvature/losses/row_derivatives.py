"""The derivatives of a loss of anchors in all cosines of a batch, which are held whole."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature.hessian.cross import RootSide
from contrastive_curvature.hessian.derivatives import CosineDerivatives, NodeSums, Totals
from contrastive_curvature.hessian.moments import MomentPart, PairMoments
from contrastive_curvature.losses.sides import Side, Sides
from contrastive_curvature.pairs.relation import Relation

if TYPE_CHECKING:
    from contrastive_curvature.losses.rows import RowLoss


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
        for known in self._sides:
            here, theirs, first = known.side.anchors, known.side.candidates, known.terms.first
            if not (self.fix.second_only or self.fix.attracting_only):
                degree[here] -= first.sum(1)
                degree[theirs] -= first.sum(0)
                neighbors[here] -= first @ self.u[theirs]
                neighbors[theirs] -= first.T @ self.u[here]
            if known.terms.second is not None and first.numel():
                for out, vector in zip(vectors, known.vectors(), strict=True):
                    out[here] += vector
                bound[here] += torch.linalg.vector_norm(known.without_top(), ord=1, dim=1)
                bound[theirs] += torch.linalg.vector_norm(known.own_second(), ord=1, dim=0)
        if self.fix.attracting_only:
            # Which pairs attract shows only once both directions of a pair are together.
            degree, neighbors = self._pairs[0].sum(1), self._pairs[0] @ self.u
        moments = None
        if not self.loss.linear:
            moments = PairMoments(self._moment_parts(), signs, vectors, bound + vectors.square().sum((0, 2)))
        value = degree.new_zeros((), dtype=torch.float64)
        return NodeSums(degree, neighbors, moments, value).checked(type(self.loss).__name__)

    @override
    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        y, c = self._pairs
        return y[start:stop, columns], None if c is None else c[start:stop, columns]

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor | None]:
        """``y`` and ``c`` of all points, each (N, N)."""
        y = self.u.new_zeros(self.n, self.n)
        c = None if self.loss.linear else torch.zeros_like(y)
        for known in self._sides:
            here, theirs, (first, second, _) = known.side.anchors, known.side.candidates, known.terms
            y[here, theirs] -= first
            y[theirs, here] -= first.T
            if c is not None and second is not None:
                c[here, theirs] += second
                c[theirs, here] += second.T
        if self.fix.second_only:
            y.zero_()
        return (y.clamp_(min=0) if self.fix.attracting_only else y), c

    @cached_property
    def squares(self) -> tuple[Tensor, RootSide] | None:
        """See :attr:`CosineDerivatives.squares`; one vector for every root of an anchor."""
        if not len(self.signs):
            return None
        signs, anchors, weights, own, points = [], [], [], [], []
        for known in self._sides:
            here, theirs = known.side.anchors, known.side.candidates
            for sign, root in zip(self.signs, known.terms.roots, strict=True):
                signs.append(sign.expand(len(root)))
                anchors.append(self.u[here])
                weights.append(root.new_zeros(len(root), self.n))
                weights[-1][:, theirs] = root
                own.append(root @ self.u[theirs])
                points.append(torch.arange(here.start, here.stop, device=self.u.device))
        vector = torch.arange(sum(map(len, signs)), device=self.u.device)
        side = RootSide(torch.cat(anchors), torch.cat(weights), vector, torch.cat(points), torch.cat(own))
        return torch.cat(signs), side

    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`CosineDerivatives.loss_and_cost`; the cost is the loss minus the least that it can be."""
        if self._values is None:
            total, cost = torch.zeros(2, dtype=torch.float64, device=self.u.device)
            for known in self._sides:
                if bool(known.kept.any()):
                    blocks = [part[known.kept] for part in known.blocks]
                    value = self.loss._checked("_value", *blocks)
                    total = total + value.double().sum()
                    cost = cost + self.loss._checked("_cost", value, *blocks).double().sum()
            self._values = (self.scale * total).to(self.u.dtype), (self.scale * cost).to(self.u.dtype)
        return self._values

    def _moment_parts(self) -> list[MomentPart]:
        """Return the weights of the moments: of the candidates of each anchor, and of the anchors of each candidate."""
        parts: dict[int, tuple[slice, slice, Tensor, Tensor]] = {}
        for known in self._sides:
            here, theirs, cosine = known.side.anchors, known.side.candidates, known.blocks[0]
            for mine, others, weights, known_cosine in (
                (here, theirs, known.without_top(), cosine),
                (theirs, here, known.as_candidates().T, cosine.T),
            ):
                before = parts[mine.start][2] if mine.start in parts else 0.0
                parts[mine.start] = mine, others, before + weights, known_cosine
        return [
            MomentPart(
                torch.arange(mine.start, mine.stop, device=self.u.device),
                lambda start, stop, w=weights, s=cosine: (w[start:stop], s[start:stop]),  # type: ignore[misc]
                self.u[others],
            )
            for mine, others, weights, cosine in parts.values()
        ]


class _Anchors:
    """The A anchors of one side with all their M candidates.

    Attributes:
        blocks: Cosines, positives and negatives, (A, M) each.
        kept: Whether an anchor has a term, shape (A,).
        count: Number of terms of the loss.
        terms: The derivatives of the loss.
    """

    def __init__(self, loss: RowLoss, relation: Relation, u: Tensor, side: Side) -> None:
        self.loss, self.side = loss, side
        self.candidates = u[side.candidates]
        positive, negative = relation.rows(side.anchors.start, side.anchors.stop, side.candidates)
        self.blocks = u[side.anchors] @ self.candidates.T, positive.to(u), negative.to(u)
        self.kept = loss._checked("_counts", *self.blocks[1:]) > 0
        self.count = float(loss._checked("_counts_at", *self.blocks).sum())
        self.terms = loss._checked_terms(*self.blocks, loss._statistics(*self.blocks), self.kept)

    def rescale(self, scale: float) -> None:
        """Multiply the loss by a number."""
        first, second, roots = self.terms
        second = None if second is None else scale * second
        self.terms = type(self.terms)(scale * first, second, tuple(scale**0.5 * root for root in roots))

    @cached_property
    def top(self) -> Tensor:
        """The candidate of the largest weight of every anchor, shape (A, 1)."""
        return cast("Tensor", self.terms.second).argmax(1, keepdim=True)

    def without_top(self) -> Tensor:
        """Return the weights ``c`` (A, M) of the candidates, but for one that is the origin of the others."""
        second = cast("Tensor", self.terms.second)
        return second.scatter(1, self.top, 0.0) if self.loss.shift_invariant and second.numel() else second

    def vectors(self) -> list[Tensor]:
        """Return the vectors of the moments of anchors, (A, D) each: their roots, and those of another origin.

        Where a shift of all cosines changes nothing, the candidates may be counted from any point. From the one of the
        largest weight, a concentrated softmax loses no digits: its variance is small, not a difference of large
        numbers.
        """
        if not self.loss.shift_invariant:
            return [root @ self.candidates for root in self.terms.roots]
        origin = self.candidates[self.top.squeeze(1)]
        few = [root.scatter(1, self.top, 0.0) for root in self.terms.roots]
        out = [root @ self.candidates - root.sum(1, keepdim=True) * origin for root in few]
        others = self.without_top()
        size, mean = others.sum(1, keepdim=True).clamp(min=0).sqrt(), others @ self.candidates
        safe = torch.where(size > 0, size, torch.ones_like(size))
        return [*out, torch.where(size > 0, size * origin - mean / safe, 0.0), torch.where(size > 0, mean / safe, 0.0)]

    def own_second(self) -> Tensor:
        """Return the second derivatives of each cosine alone, the squares of the roots included, (A, M)."""
        out = cast("Tensor", self.terms.second)
        for sign, root in zip(self.loss.root_signs, self.terms.roots, strict=True):
            out = torch.addcmul(out, root, root, value=float(sign))
        return out

    def as_candidates(self) -> Tensor:
        """Return the weights (A, M) of the anchors in the moments of their candidates."""
        out = self.own_second()
        if not (self.loss.shift_invariant and self.terms.roots and out.numel()):
            return out
        # Rows of second derivatives sum to zero: where one weight is nearly all, it is minus those of the others.
        exact = torch.zeros_like(out[:, :1])
        for sign, root in zip(self.loss.root_signs, self.terms.roots, strict=True):
            rest = root.scatter(1, self.top, 0.0).sum(1, keepdim=True)
            exact -= sign * root.gather(1, self.top) * rest
        return out.scatter(1, self.top, exact)
