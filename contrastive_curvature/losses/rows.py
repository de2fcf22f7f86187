"""Losses that compare all candidates of an anchor with each other: the four rules of each, and what follows from them.

The derivatives in all cosines of a batch are held whole.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError
from contrastive_curvature.hessian.cross import RootSide
from contrastive_curvature.hessian.derivatives import CosineDerivatives, NodeSums, Totals
from contrastive_curvature.hessian.moments import MomentPart, PairMoments
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.sides import Side, Sides, joined_towers, one_tower, two_towers
from contrastive_curvature.options import Distance, PDFix
from contrastive_curvature.pairs import Pairs
from contrastive_curvature.pairs.edges import make_targets
from contrastive_curvature.pairs.relation import Relation

_SMALLEST_TEMPERATURE = 1e-6
"""Curvatures go with the inverse square of a temperature; at a smaller one float32 has no digits of a cosine left."""


class RowTerms(NamedTuple):
    """Derivatives of the loss of anchors in a block of their cosines (B, M).

    The second derivatives of anchor i are ``diag(second_i) + sum_r sign_r roots_ri roots_ri^T``, with the signs of
    :attr:`RowLoss.root_signs`.

    Attributes:
        first: ``g = dL/ds``, shape (B, M).
        second: ``c``, shape (B, M); ``None`` where the loss is piecewise linear in the cosines.
        roots: ``q``, one tensor of shape (B, M) for every sign.
    """

    first: Tensor
    second: Tensor | None
    roots: tuple[Tensor, ...] = ()


class RowLoss(CosineLoss):
    """A loss of anchors: each compares its positives with its negatives, all at once, through their cosines.

    ``L = sum_i l(s_i)`` over anchors i, with the row ``s_i`` of cosines between the anchor and its candidates. In one
    tower all points are anchors, and the others are their candidates; with two towers (:class:`~contrastive_curvature
    .TwoTowers`) the candidates of a point of one tower are the points of the other.

    A subclass writes four rules on a block of rows: :meth:`_counts`, :meth:`_value`, :meth:`_statistics` and
    :meth:`_terms`. It inherits the output Hessian, every structure of the parameter curvature, and the hosts.

    Args:
        reduction: ``"mean"`` over the terms of :meth:`_counts`, as the libraries that people train with have it, or
            ``"sum"``. A fit of a posterior takes the mean of every batch times its number of anchors, of two towers in
            both directions times their mean.
        directions: With two towers, which one has the anchors: ``"both"`` (each direction counts one half), ``"a"`` or
            ``"b"``. Of no effect in one tower.
        distance: Of no effect on the loss; how its curvature is split, see
            :class:`~contrastive_curvature.options.Distance`.
        pd_fix: Of no effect on the loss; how its curvature is made positive definite, see
            :class:`~contrastive_curvature.options.PDFix`.

    Raises:
        InputError: An option is unknown or out of range.
    """

    compares = "anchors"

    root_signs: ClassVar[tuple[int, ...]] = ()
    """Signs of the roots that :meth:`_terms` gives."""

    shift_invariant: ClassVar[bool] = False
    """Whether the same number added to all cosines of an anchor leaves the loss as it is, as for a softmax."""

    def __init__(
        self,
        reduction: str = "mean",
        directions: str = "both",
        *,
        distance: Distance | str = Distance.ARCCOS,
        pd_fix: PDFix | str = PDFix.PSD_PARTS,
    ) -> None:
        super().__init__(distance=distance, pd_fix=pd_fix)
        validate.choice("reduction", reduction, ("mean", "sum"))
        validate.choice("directions", directions, ("both", "a", "b"))
        self.reduction, self.directions = reduction, directions

    @property
    def averages(self) -> bool:
        """Return whether the loss is a mean."""
        return self.reduction == "mean"

    @abstractmethod
    def _counts(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Return how many terms of the loss every anchor has, shape (B,); an anchor with zero is left out.

        Args:
            positive: How often each candidate counts as a positive, shape (B, M); zero for the anchor itself.
            negative: How often it counts as a negative, shape (B, M).
        """

    def _counts_at(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Return how many terms a mean is over, (B,), where that depends on the cosines; otherwise :meth:`_counts`."""
        return self._counts(positive, negative)

    @abstractmethod
    def _value(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Compute the loss of every anchor, summed over its terms, differentiable by autograd.

        Args:
            cosine: ``s``, shape (B, M), with all candidates of an anchor in its row.
            positive: See :meth:`_counts`.
            negative: See :meth:`_counts`.

        Returns:
            Shape (B,). Rows with a count of zero are not used, but must not raise.
        """

    def _cost(self, value: Tensor, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Return how far the loss of an anchor is above the least at any embeddings, shape (B,); mostly all of it.

        Args:
            value: What :meth:`_value` gives, shape (B,).
            cosine: The other arguments as there.
            positive: See :meth:`_counts`.
            negative: See :meth:`_counts`.
        """
        return value

    @abstractmethod
    def _statistics(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Compute what :meth:`_terms` needs to know of a whole row; arguments as in :meth:`_value`.

        Returns:
            Shape (B, K), best with a K that does not depend on the number of candidates.
        """

    @abstractmethod
    def _terms(self, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor) -> RowTerms:
        """Compute the derivatives of :meth:`_value` in some of the candidates.

        Args:
            cosine: ``s``, shape (B, C), with C of the M candidates.
            positive: Of the same.
            negative: Of the same.
            statistics: Of the whole rows, shape (B, K).
        """

    @override
    def relate(self, z: Tensor, labels: Tensor | None, pairs: Pairs | None) -> Relation:
        if isinstance(pairs, Tensor):
            if labels is not None:
                hint = "Partners and targets need no labels."
                raise InputError("labels, pairs", "one of them", "both", hint)
            return make_targets(pairs, z.shape[0], z.device)
        return super().relate(z, labels, pairs)

    def _at(self, u: Tensor, relation: Relation) -> Tensor:
        return self._value_of(u, relation, one_tower(len(u)))

    def derivatives(
        self, relation: Relation, u: Tensor, *, sides: Sides | None = None, as_data: bool = False
    ) -> CosineDerivatives:
        """Return the derivatives of this loss in the cosines of N points.

        Args:
            relation: Which pairs are positive and negative.
            u: Unit embeddings, shape (N, D).
            sides: Which points are anchors, and of which candidates; by default all points of one tower.
            as_data: Whether a mean is multiplied by its number of anchors, as a fit has it.
        """
        return RowDerivatives(self, relation, u, sides or one_tower(len(u)), as_data=as_data)

    def data_hessian(self, z: Tensor, relation: Relation, n_data: int | None = None) -> OutputHessian:
        """See :meth:`CosineLoss.data_hessian`: a mean over terms counts times its number of anchors."""
        return self.hessian_at(z, relation, as_data=True)

    def between(self, z_a: Tensor, z_b: Tensor, labels: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Compute the loss of two towers.

        Args:
            z_a: Raw or normalised embeddings of the first tower, shape (N, D).
            z_b: Of the second tower, shape (M, D).
            labels: Labels of both, (N,) and (M,): points of the same label are positives. ``None`` where ``z_a[i]``
                belongs to ``z_b[i]``.

        Returns:
            A scalar.

        Raises:
            InputError: The towers have another width or, without labels, another number of points.
        """
        z, relation, first = joined_towers(z_a, z_b, labels)
        return self._value_of(normalize(z)[0], relation, two_towers(first, len(z), self.directions))

    def _value_of(self, u: Tensor, relation: Relation, sides: Sides) -> Tensor:
        total, terms = u.new_zeros((), dtype=torch.float64), 0.0
        for side in sides:
            masks = relation.rows(side.anchors.start, side.anchors.stop, side.candidates)
            positive, negative = (mask.to(u) for mask in masks)
            kept = self._checked("_counts", positive, negative) > 0
            if bool(kept.any()):
                cosine = u[side.anchors][kept] @ u[side.candidates].T
                positive, negative = positive[kept], negative[kept]
                total = total + self._checked("_value", cosine, positive, negative).double().sum()
                terms += float(self._counts_at(cosine.detach(), positive, negative).sum())
        scale = self._scale(terms, sides, 0, as_data=False)
        return (scale * total).to(u.dtype) + 0 * u.sum()

    def _checked(self, rule: str, *blocks: Tensor) -> Tensor:
        """Return what a rule gives of blocks (B, M), if it is one number for each anchor, shape (B,)."""
        numbers, rows = getattr(self, rule)(*blocks), len(blocks[0])
        name = f"{type(self).__name__}.{rule}"
        if not isinstance(numbers, Tensor) or tuple(numbers.shape) != (rows,):
            came = f"shape {tuple(numbers.shape)}" if isinstance(numbers, Tensor) else f"a {type(numbers).__name__}"
            raise InputError(name, f"one number for each of {rows} anchors, shape ({rows},)", came)
        if bool(numbers.detach().isnan().any()):
            raise InputError(name, "numbers", "NaN")
        return numbers

    def _checked_terms(
        self, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor, kept: Tensor
    ) -> RowTerms:
        """Return what :meth:`_terms` gives, each (B, C), with zeros where an anchor has no term (``kept``, (B,))."""
        terms = self._check_terms(self._terms(cosine, positive, negative, statistics), RowTerms, cosine)
        if len(terms.roots) != len(self.root_signs):
            wanted = f"{len(self.root_signs)} roots, as root_signs says"
            raise InputError(f"{type(self).__name__}._terms", wanted, len(terms.roots))
        if bool(kept.all()):
            return terms
        first, second, roots = terms
        row, second = kept.unsqueeze(1), None if second is None else torch.where(kept.unsqueeze(1), second, 0.0)
        return RowTerms(torch.where(row, first, 0.0), second, tuple(torch.where(row, root, 0.0) for root in roots))

    def _scale(self, terms: float, sides: Sides, anchors: int, *, as_data: bool) -> float:
        """Return the factor of the sum over all anchors of all sides.

        Args:
            terms: Number of terms.
            sides: One tower, or both directions of two.
            anchors: Number of anchors that have a term.
            as_data: See :meth:`derivatives`.
        """
        if not self.averages:
            return 1 / len(sides)
        return (anchors / len(sides) if as_data else 1.0) / terms if terms else 0.0


def check_temperature(value: object) -> float:
    """Return ``value`` if it is a temperature that cosines can be divided by."""
    number = validate.number("temperature", value, positive=True)
    if number < _SMALLEST_TEMPERATURE:
        raise InputError("temperature", f"a number of at least {_SMALLEST_TEMPERATURE:g}", number)
    return number


def weighted_logsumexp(logits: Tensor, times: Tensor) -> Tensor:
    """Return ``log sum_j m_j exp(logit_j)``, shape (B,), over candidates that count ``m_j`` times; -inf without any."""
    weighted = torch.where(times > 0, logits + times.log(), -torch.inf)
    some = (times > 0).any(1)
    # Kept out of the sum: the gradient of the logarithm of zero is NaN.
    inside = torch.where(some.unsqueeze(1), weighted, 0.0).logsumexp(1)
    return torch.where(some, inside, -torch.inf)


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
