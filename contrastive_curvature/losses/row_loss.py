"""Losses that compare all candidates of an anchor with each other: four rules per loss, and their derivatives.

Derivatives in the cosines are stored whole for at most one batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature import validate, waiting
from contrastive_curvature.errors import InputError
from contrastive_curvature.hessian.cross import RootSide
from contrastive_curvature.hessian.derivatives import CosineDerivatives, NodeSums, Totals
from contrastive_curvature.hessian.moments import MomentPart, Moments
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.sides import Side, Sides, joined_towers, moved, one_tower, two_towers
from contrastive_curvature.options import Distance, PDFix
from contrastive_curvature.pairs import Pairs
from contrastive_curvature.pairs.edges import make_targets
from contrastive_curvature.pairs.relation import Relation

_SMALLEST_TEMPERATURE = 1e-6
"""Curvatures go with the inverse square of a temperature; at a smaller one float32 has no digits of a cosine left."""


class RowTerms(NamedTuple):
    """Derivatives of the anchors' losses in a block of their cosines (B, M).

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

    def map(self, change: Callable[[Tensor], Tensor]) -> RowTerms:
        """Apply ``change`` to every block."""
        second = None if self.second is None else change(self.second)
        return RowTerms(change(self.first), second, tuple(change(root) for root in self.roots))


class RowLoss(CosineLoss):
    """A loss of anchors: each anchor compares all its positives with all its negatives through their cosines.

    ``L = sum_i l(s_i)`` over anchors i, with the row ``s_i`` of cosines between the anchor and its candidates. In one
    tower all points are anchors, and the candidates of an anchor are all other points; with two towers
    (:class:`~contrastive_curvature .TwoTowers`) the candidates of a point are the points of the other tower.

    A subclass writes four rules on a block of rows: :meth:`_counts`, :meth:`_value`, :meth:`_statistics` and
    :meth:`_terms`. It inherits the output Hessian, every structure of the parameter curvature, and the hosts.

    Args:
        reduction: ``"mean"`` over the terms of :meth:`_counts`, as in libraries for training, or ``"sum"``. A fit of a
            posterior multiplies the mean of every batch by its number of anchors; with both directions of two towers,
            by the mean number per direction.
        directions: The tower of the anchors: ``"both"`` (each direction counts one half), ``"a"`` or ``"b"``. Without
            effect in one tower.
        distance: How the curvature of the loss is split, without effect on the loss, see
            :class:`~contrastive_curvature.options.Distance`.
        pd_fix: How the curvature is made positive definite, without effect on the loss, see
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
        """Count the terms of the loss for every anchor, shape (B,); an anchor without a term is left out.

        Args:
            positive: How often each candidate counts as a positive, shape (B, M); zero for the anchor itself.
            negative: How often each candidate counts as a negative, shape (B, M).
        """

    def _counts_at(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Count each anchor's terms in a mean, (B,), if they depend on the cosines; otherwise :meth:`_counts`."""
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
        """Return the loss of every anchor minus its minimum over all embeddings, shape (B,); by default ``value``.

        Args:
            value: Losses from :meth:`_value`, shape (B,).
            cosine: See :meth:`_value`.
            positive: See :meth:`_counts`.
            negative: See :meth:`_counts`.

        Rows with a count of zero are not used, but must not raise.
        """
        return value

    @abstractmethod
    def _statistics(self, cosine: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Compute the numbers of a whole row that :meth:`_terms` needs; arguments as in :meth:`_value`.

        Returns:
            Shape (B, K); K should not depend on the number of candidates.
        """

    @abstractmethod
    def _terms(self, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor) -> RowTerms:
        """Compute the derivatives of :meth:`_value` in some of the candidates.

        Args:
            cosine: ``s``, shape (B, C), with C of the M candidates.
            positive: Multiplicities as positives, shape (B, C).
            negative: Multiplicities as negatives, shape (B, C).
            statistics: Statistics of the whole rows, shape (B, K).
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
            sides: The anchors and their candidates; by default all points of one tower.
            as_data: Whether a mean is multiplied by its number of anchors, as in a fit.
        """
        return RowDerivatives(self, relation, u, sides or one_tower(len(u)), as_data=as_data)

    def data_hessian(self, z: Tensor, relation: Relation, n_data: int | None = None) -> OutputHessian:
        """See :meth:`CosineLoss.data_hessian`; multiplies a mean over terms by the number of anchors."""
        return self.hessian_at(z, relation, as_data=True)

    def between(self, z_a: Tensor, z_b: Tensor, labels: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Compute the loss of two towers.

        Args:
            z_a: Raw or normalised embeddings of the first tower, shape (N, D).
            z_b: Embeddings of the second tower, shape (M, D).
            labels: Labels of both towers, (N,) and (M,): points with the same label are positives. With ``None``,
                ``z_a[i]`` belongs to ``z_b[i]``.

        Returns:
            A scalar.

        Raises:
            InputError: The towers have different widths or, without labels, different numbers of points.
        """
        z, relation, first = joined_towers(z_a, z_b, labels)
        return self._value_of(normalize(z)[0], relation, two_towers(first, len(z), self.directions))

    def _value_of(self, u: Tensor, relation: Relation, sides: Sides) -> Tensor:
        total, terms = torch.zeros(2, dtype=torch.float64, device=u.device)
        for side in sides:
            for rows in side.row_blocks():
                positive, negative = (mask.to(u) for mask in relation.rows(rows.start, rows.stop, side.candidates))
                kept = self._checked("_counts", positive, negative) > 0
                if bool(kept.any()):
                    cosine = u[rows][kept] @ u[side.candidates].T
                    positive, negative = positive[kept], negative[kept]
                    total = total + self._checked("_value", cosine, positive, negative).double().sum()
                    terms = terms + self._counts_at(cosine.detach(), positive, negative).double().sum()
        scale = self._scale(terms, sides)
        return (scale * total).to(u.dtype) + 0 * u.sum()

    def _checked(self, rule: str, *blocks: Tensor, kept: Tensor | None = None) -> Tensor:
        """Apply a rule to blocks (B, M), and check that it returns one number per anchor, shape (B,).

        With ``kept``, booleans (B,), all others become zero.
        """
        numbers, rows = getattr(self, rule)(*blocks), len(blocks[0])
        name = f"{type(self).__name__}.{rule}"
        if not isinstance(numbers, Tensor) or tuple(numbers.shape) != (rows,):
            got = f"shape {tuple(numbers.shape)}" if isinstance(numbers, Tensor) else f"a {type(numbers).__name__}"
            raise InputError(name, f"one number for each of {rows} anchors, shape ({rows},)", got)
        if kept is not None:
            numbers = torch.where(kept, numbers, 0.0)
        waiting.require(~numbers.detach().isnan().any(), lambda: InputError(name, "numbers", "NaN"))
        return numbers

    def _checked_terms(
        self, cosine: Tensor, positive: Tensor, negative: Tensor, statistics: Tensor, kept: Tensor
    ) -> RowTerms:
        """Return the checked :meth:`_terms`, each (B, C), with zeros for anchors without a term: not ``kept``."""
        terms = self._check_terms(self._terms(cosine, positive, negative, statistics), RowTerms, cosine)
        if len(terms.roots) != len(self.root_signs):
            wanted = f"{len(self.root_signs)} roots, as root_signs says"
            raise InputError(f"{type(self).__name__}._terms", wanted, len(terms.roots))
        # On a GPU, waiting for the answer takes longer than the copies.
        if not waiting.waits(kept) and bool(kept.all()):
            return terms
        row = kept.unsqueeze(1)
        return terms.map(lambda part: torch.where(row, part, 0.0))

    def _scale(self, terms: Tensor, sides: Sides, anchors: Tensor | None = None) -> Tensor:
        """Return the factor of the sum over the anchors of all sides, float64, shape ().

        Args:
            terms: Number of terms, float64, shape ().
            sides: One tower, or the directions of two towers.
            anchors: Number of anchors with a term, shape (), by which a fit multiplies a mean; ``None`` for the mean.
        """
        if not self.averages:
            return torch.full_like(terms, 1 / len(sides))
        times = torch.ones_like(terms) if anchors is None else anchors.double() / len(sides)
        return torch.where(terms > 0, times / terms, 0.0)


def check_temperature(value: object) -> float | Tensor:
    """Return ``value`` if it is a usable temperature: cosines are divided by it."""
    number = validate.hyperparameter("temperature", value, positive=True)
    if number < _SMALLEST_TEMPERATURE:
        raise InputError(
            "temperature", f"a number of at least {_SMALLEST_TEMPERATURE:g}", validate.without_graph(number)
        )
    return number


def weighted_logsumexp(logits: Tensor, times: Tensor) -> Tensor:
    """Return ``log sum_j m_j exp(logit_j)``, shape (B,), over candidates that count ``m_j`` times; -inf without any."""
    weighted = torch.where(times > 0, logits + times.log(), -torch.inf)
    some = (times > 0).any(1)
    # Rows without a candidate are kept out of the sum: the gradient of the logarithm of zero is NaN.
    inside = torch.where(some.unsqueeze(1), weighted, 0.0).logsumexp(1)
    return torch.where(some, inside, -torch.inf)


_HELD_ELEMENTS = 2**24
"""Pairs whose derivatives are kept instead of being computed again."""


class RowDerivatives(CosineDerivatives):
    """``y``, ``c`` and the roots of a :class:`~contrastive_curvature.losses.row_loss.RowLoss`.

    A pair of points has the weight ``y_ij = -(dL/ds_ij + dL/ds_ji)``, and ``c`` likewise.

    Args:
        loss: The loss.
        relation: Which pairs are positive and negative.
        u: Unit embeddings, shape (N, D).
        sides: The anchors and their candidates.
        as_data: See :meth:`RowLoss.derivatives`.
    """

    def __init__(self, loss: RowLoss, relation: Relation, u: Tensor, sides: Sides, *, as_data: bool = False) -> None:
        self.loss, self.u, self.n, self.fix = loss, u, len(u), loss.pd_fix
        self.signs = waiting.sent(torch.tensor(loss.root_signs, dtype=u.dtype, device="cpu"), u.device)
        # With ``attracting_only``, the sign of a pair's weight is known only after both directions are added.
        self._summed = not (self.fix.second_only or self.fix.attracting_only)
        self._values: tuple[Tensor, Tensor] | None = None
        self._sides = [_Anchors(loss, relation, u, side) for side in sides]
        self.anchors = torch.cat([known.kept for known in self._sides]).sum()
        self.skipped = sum(known.kept.numel() for known in self._sides) - self.anchors
        terms = torch.stack([known.count for known in self._sides]).sum()
        # Multiplied into sums over pairs, not into the pairs.
        self.scale = loss._scale(terms, sides, self.anchors if as_data else None)

    @override
    def node_sums(self) -> NodeSums:
        degree, neighbors = self.u.new_zeros(self.n), torch.zeros_like(self.u)
        shifted = self.loss.shift_invariant and not self.loss.linear
        ends = waiting.sent(torch.tensor([1, -1], dtype=self.u.dtype, device="cpu"), self.u.device)
        signs = torch.cat([self.signs, ends]) if shifted else self.signs
        vectors, bound = self.u.new_zeros(len(signs), *self.u.shape), self.u.new_zeros(self.n)
        for known in self._sides:
            theirs = known.side.candidates
            for here in known.side.row_blocks(3):
                terms = known.at(here)
                if self._summed:
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
        for part, power in ((degree, 1), (neighbors, 1), (bound, 1), (vectors, 0.5)):
            part *= self.scale**power
        if self.fix.attracting_only:
            for rows, y, _ in self.row_blocks(3):
                degree[rows], neighbors[rows] = y.sum(1), y @ self.u
        moments = None
        if not self.loss.linear:
            moments = Moments(list(self._parts()), signs, vectors, bound + vectors.square().sum((0, 2)))
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
        y *= self.scale
        if c is not None:
            c *= self.scale
        if self.fix.second_only:
            y.zero_()
        return (y.clamp_(min=0) if self.fix.attracting_only else y), c

    @override
    def matmul(self, t: Tensor) -> Tensor:
        out = torch.zeros_like(t)
        for known in self._sides if self._summed or not self.loss.linear else ():
            theirs = known.side.candidates
            candidates, changes = self.u[theirs], t[theirs]
            for here in known.side.row_blocks(3):
                terms, anchors = known.at(here), self.u[here]
                if self._summed:
                    out[here] += (terms.first @ changes.flatten(1)).view_as(t[here])
                    out[theirs] += (terms.first.T @ t[here].flatten(1)).view_as(changes)
                if terms.second is None:
                    continue
                second = terms.second
                squares = torch.zeros_like(second)
                for sign, root in zip(self.loss.root_signs, terms.roots, strict=True):
                    squares.addcmul_(root, root, value=float(sign))
                # The effect of a point's change on its own row and its own column is left out.
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
        out *= self.scale
        if self.fix.attracting_only:
            for rows, y, _ in self.row_blocks():
                out[rows] -= (y @ t.flatten(1)).view_as(t[rows])
        return out

    def loss_and_cost(self, totals: Totals | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`CosineDerivatives.loss_and_cost`; cost: the loss minus its minimum."""
        if self._values is None:
            total, cost = torch.zeros(2, dtype=torch.float64, device=self.u.device)
            for known in self._sides:
                for here in known.side.row_blocks(3) if known.side.shape[1] else ():
                    kept, block = known.kept[known.local(here)], known.block(here)
                    value = self.loss._checked("_value", *block, kept=kept)
                    total = total + value.double().sum()
                    cost = cost + self.loss._checked("_cost", value, *block, kept=kept).double().sum()
            self._values = (self.scale * total).to(self.u.dtype), (self.scale * cost).to(self.u.dtype)
        return self._values

    def _parts(self) -> Iterator[MomentPart]:
        """Iterate over the weights of the moments, for every range of points with the same candidates."""
        # A second side only swaps the anchors and the candidates of the first one.
        side = self._sides[0].side
        ranges = [(side.anchors, side.candidates)]
        if side.anchors != side.candidates:
            ranges.append((side.candidates, side.anchors))
        for points, others in sorted(ranges, key=lambda part: (part[0].start, part[0].stop)):
            numbers = torch.arange(points.start, points.stop, device="cpu")
            yield MomentPart(numbers, partial(self._moment_weights, points), self.u[others], first=points.start)

    def _moment_weights(self, points: slice, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Return the candidates' weights for points ``start..stop``, in both directions; and known cosines."""
        here, cosine = slice(start, stop), None
        weights: list[Tensor] = []
        for known in self._sides:
            if known.side.anchors == points:
                weights.append(known.without_top(here, known.at(here)))
                cosine = None if known.cosines is None else known.cosines[known.local(here)]
            if known.side.candidates == points:
                weights.append(self._as_candidates(known, here))
        return self.scale * reduce(torch.add, weights), cosine

    def _as_candidates(self, known: _Anchors, candidates: slice) -> Tensor:
        terms = known.at(known.side.anchors, candidates)
        out = self._own_second(terms)
        if self.loss.shift_invariant and len(self.signs):
            # Rows of second derivatives sum to zero, so a dominant weight is minus the sum of the other weights.
            column = (known.top + known.side.candidates.start - candidates.start).unsqueeze(1)
            place = column.clamp(0, candidates.stop - candidates.start - 1)
            exact = torch.zeros_like(place, dtype=out.dtype)
            for sign, root, rest in zip(self.signs, terms.roots, known.rest, strict=True):
                exact -= sign * root.gather(1, place) * rest.unsqueeze(1)
            out = out.scatter(1, place, torch.where(column == place, exact, out.gather(1, place)))
        return out.T

    def _own_second(self, terms: RowTerms) -> Tensor:
        """Return the second derivative in each single cosine, including the squares of the roots."""
        out = cast("Tensor", terms.second)
        for sign, root in zip(self.loss.root_signs, terms.roots, strict=True):
            out = torch.addcmul(out, root, root, value=float(sign))
        return out

    @override
    def squares(self, points: slice) -> tuple[Tensor, RootSide] | None:
        if not len(self.signs):
            return None
        weights, anchors, offset = [], [], 0
        vector, place, own = [], [], []
        for known in self._sides:
            side = known.side
            inside, here = _overlap(points, side.candidates), _overlap(points, side.anchors)
            of_candidates, of_anchors = known.at(side.anchors, inside), known.at(here)
            for root, of_anchor in zip(of_candidates.roots, of_anchors.roots, strict=True):
                all_points = self.u.new_zeros(side.shape[0], points.stop - points.start)
                all_points[:, moved(inside, -points.start)] = root
                weights.append(all_points)
                anchors.append(self.u[side.anchors])
                numbers = torch.arange(here.start, here.stop, device=self.u.device)
                vector.append(offset + numbers - side.anchors.start)
                place.append(numbers - points.start)
                own.append(of_anchor @ self.u[side.candidates])
                offset += side.shape[0]
        signs = torch.cat([self.signs.repeat_interleave(known.side.shape[0]) for known in self._sides])
        scale = self.scale**0.5
        entries = (torch.cat(vector), torch.cat(place), scale * torch.cat(own))
        return signs, RootSide(torch.cat(anchors), scale * torch.cat(weights), entries)


class _Anchors:
    """The A anchors of one side, after one pass over all their candidates; ranges count among all N points.

    Attributes:
        count: Number of terms of the loss.
        statistics: See :meth:`RowLoss._statistics`, shape (A, K).
        kept: Whether an anchor has a term, shape (A,).
        top: Candidate of each anchor with the largest weight, shape (A,).
        rest: ``sum_j q_rj`` over all other candidates, shape (R, A).
        held: First and second derivatives and roots of all pairs, (A, M) each; ``None`` for many pairs.
        cosines: Cosines of the same pairs.
    """

    def __init__(self, loss: RowLoss, relation: Relation, u: Tensor, side: Side) -> None:
        self.loss, self.relation, self.u, self.side = loss, relation, u, side
        count, many = side.shape
        self.count = u.new_zeros((), dtype=torch.float64)
        self.held: RowTerms | None = None
        self.cosines: Tensor | None = None
        self.kept = torch.zeros(count, dtype=torch.bool, device=u.device)
        self.top = torch.zeros(count, dtype=torch.int64, device=u.device)
        self.rest = u.new_zeros(len(loss.root_signs), count)
        held: list[tuple[Tensor, RowTerms]] = []
        statistics = [u.new_zeros(0, 0)] if not count else []
        for here in side.row_blocks(3):
            rows, block = self.local(here), self.block(here)
            self.kept[rows] = loss._checked("_counts", *block[1:]) > 0
            self.count += loss._checked("_counts_at", *block).sum()
            statistics.append(loss._statistics(*block))
            terms = loss._checked_terms(*block, statistics[-1], self.kept[rows])
            if terms.second is not None and many:
                self.top[rows] = terms.second.argmax(1)
                for rest, root in zip(self.rest, terms.roots, strict=True):
                    rest[rows] = root.scatter(1, self.top[rows, None], 0.0).sum(1)
            if count * many <= _HELD_ELEMENTS:
                held.append((block[0], terms))
        self.statistics = torch.cat(statistics)
        if held:
            self.cosines = _cat([cosine for cosine, _ in held])
            self.held = _joined([terms for _, terms in held])

    def local(self, anchors: slice) -> slice:
        """Shift a range of anchors so that it counts from the first anchor of this side."""
        return moved(anchors, -self.side.anchors.start)

    def block(self, anchors: slice, candidates: slice | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return cosines, positives and negatives between some anchors and some or all candidates."""
        chosen = self.side.candidates if candidates is None else candidates
        positive, negative = (mask.to(self.u) for mask in self.relation.rows(anchors.start, anchors.stop, chosen))
        if self.cosines is None:
            return self.u[anchors] @ self.u[chosen].T, positive, negative
        return self.cosines[self.local(anchors), moved(chosen, -self.side.candidates.start)], positive, negative

    def at(self, anchors: slice, candidates: slice | None = None) -> RowTerms:
        """Return the derivatives of the sum over the anchors for some anchors and some or all of their candidates."""
        rows = self.local(anchors)
        if self.held is None:
            block = self.block(anchors, candidates)
            return self.loss._checked_terms(*block, self.statistics[rows], self.kept[rows])
        columns = moved(self.side.candidates if candidates is None else candidates, -self.side.candidates.start)
        return self.held.map(lambda part: part[rows, columns])

    def without_top(self, anchors: slice, terms: RowTerms) -> Tensor:
        """Return the weights ``c`` (B, M) of the candidates, with zero for a candidate that serves as origin."""
        second = cast("Tensor", terms.second)
        return second.scatter(1, self.top[self.local(anchors), None], 0.0) if self.loss.shift_invariant else second

    def vectors(self, anchors: slice, terms: RowTerms) -> list[Tensor]:
        """Return the vectors of the anchors' moments, (B, D) each: the roots, and the vectors for another origin.

        If a shift of all cosines changes nothing, the candidates may be measured from any origin. With the origin at
        the candidate of largest weight, a concentrated softmax loses no digits: its small variance is not a difference
        of large numbers.
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


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _joined(parts: list[RowTerms]) -> RowTerms:
    first, second, roots = zip(*parts, strict=True)
    return RowTerms(
        _cat(first), None if second[0] is None else _cat(second), tuple(map(_cat, zip(*roots, strict=True)))
    )
