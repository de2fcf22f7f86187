"""CoSENT: pairs of graded similarity, whose cosines should be in the order of their grades."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.hessian.cross import CrossRoots, PointVectors
from contrastive_curvature.hessian.derivatives import CosineDerivatives, NodeSums
from contrastive_curvature.hessian.moments import Moments
from contrastive_curvature.hessian.sphere import normalize, project_tangent
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.sides import joined_towers
from contrastive_curvature.options import Distance, PDFix
from contrastive_curvature.pairs import Pairs
from contrastive_curvature.pairs.edges import GradedPairs, placed
from contrastive_curvature.pairs.relation import Relation, row_ranges


class CoSENTLoss(CosineLoss):
    r"""CoSENT: compares the cosines of any two pairs of different grades, all of a batch at once.

    With the cosine ``s_k`` and the grade ``y_k`` of each of K listed pairs, and the scale ``a``:

    .. math::
        L = \log \Big( 1 + \sum_{(k, l) : y_k > y_l} e^{a (s_l - s_k)} \Big)

    Only the order of the grades counts; with fewer than two different ones, the loss is zero. It is one number for a
    batch, not a mean over pairs, and a fit of a posterior takes the sum over batches.

    Its second derivatives couple all pairs with each other, a matrix (K, K) that is held in memory; they are positive
    semidefinite. It is ``CoSENTLoss`` of sentence-transformers.

    Args:
        scale: ``a``, positive: one over the temperature.
        distance: See :class:`~contrastive_curvature.options.Distance`.
        pd_fix: See :class:`~contrastive_curvature.options.PDFix`. ``"positive"`` keeps the first-order part of the
            pairs whose cosine should be larger.

    Raises:
        InputError: An option is unknown or out of range.

    Source: Su, CoSENT: a more effective sentence embedding scheme than Sentence-BERT, 2022,
    https://kexue.fm/archives/8847.
    """

    compares = "grades"

    def __init__(
        self, scale: float = 20.0, *, distance: Distance | str = Distance.ARCCOS, pd_fix: PDFix | str = PDFix.PSD_PARTS
    ) -> None:
        super().__init__(distance=distance, pd_fix=pd_fix)
        self.scale = validate.number("scale", scale, positive=True)

    def relate(self, z: Tensor, labels: Tensor | None, pairs: Pairs | None) -> GradedPairs:
        """See :meth:`CosineLoss.relate`."""
        wanted = "(a, b, grades): two points and a grade for every pair"
        if labels is not None:
            raise InputError("labels", "None", "labels", f"Pass pairs={wanted}.")
        if not isinstance(pairs, (tuple, list)):
            came = "None" if pairs is None else f"a {type(pairs).__name__}"
            raise InputTypeError("pairs", wanted, came)
        if len(pairs) != 3:
            raise InputError("pairs", wanted, f"a tuple of {len(pairs)}")
        return GradedPairs(*pairs, len(z), z.device)

    def between(self, z_a: Tensor, z_b: Tensor, grades: Tensor) -> Tensor:
        """Compute the loss of pairs of two towers.

        Its output Hessian is that of ``torch.cat([z_a, z_b])`` with ``pairs=(arange(K), arange(K, 2 * K), grades)``.

        Args:
            z_a: Raw or normalised embeddings of the first points, shape (K, D).
            z_b: Of the second points, in the same order, shape (K, D).
            grades: Shape (K,).

        Returns:
            A scalar.

        Raises:
            InputError: The towers have another shape, or the grades are malformed.
        """
        z, _, count = joined_towers(z_a, z_b)
        index = torch.arange(len(z), device=z.device)
        return self._at(normalize(z)[0], self.relate(z, None, (index[:count], index[count:], grades)))

    def derivatives(self, relation: Relation, u: Tensor) -> CoSENTDerivatives:
        """See :meth:`CosineLoss.derivatives`; of graded pairs."""
        if not isinstance(relation, GradedPairs):
            raise InputError("relation", "graded pairs", f"a {type(relation).__name__}")
        return CoSENTDerivatives(self, relation, u)

    def _at(self, u: Tensor, relation: GradedPairs) -> Tensor:
        cosine = (u[relation.a] * u[relation.b]).sum(1)
        gaps = (self.scale * (cosine - cosine.unsqueeze(1)))[_higher(relation.grades)]
        return torch.cat([gaps.new_zeros(1), gaps]).logsumexp(0) + 0 * u.sum()

    def shares(self, cosine: Tensor, grades: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``e^(a (s_l - s_k) - L)`` where ``y_k > y_l``, zero elsewhere, (K, K); ``e^-L``; and L."""
        gaps = (self.scale * (cosine - cosine.unsqueeze(1))).masked_fill(~_higher(grades), -torch.inf)
        value = torch.cat([gaps.new_zeros(1), gaps.flatten()]).logsumexp(0)
        return (gaps - value).exp(), (-value).exp(), value


def _higher(grades: Tensor) -> Tensor:
    """Return whether pair k has a higher grade than pair l, shape (K, K)."""
    return grades.unsqueeze(1) > grades


class CoSENTDerivatives(CosineDerivatives):
    """``y`` and the second derivatives ``C`` (P, P) of a :class:`~contrastive_curvature.losses.cosent.CoSENTLoss`.

    The pairs are the P different ones among the K listed.

    Args:
        loss: The loss.
        pairs: Which pairs there are.
        u: Unit embeddings, shape (N, D).
    """

    def __init__(self, loss: CoSENTLoss, pairs: GradedPairs, u: Tensor) -> None:
        self.u, self.n = u, len(u)
        self.anchors = self.n
        self.fix = loss.pd_fix
        low, high = torch.minimum(pairs.a, pairs.b), torch.maximum(pairs.a, pairs.b)
        keys, place = (low * self.n + high).unique(return_inverse=True)
        self.i, self.j = keys // max(1, self.n), keys % max(1, self.n)
        shares, none, self._summed_value = loss.shares((u[low] * u[high]).sum(1), pairs.grades)
        first, second = _moments(shares, none)
        count = len(keys)
        y = -loss.scale * first.new_zeros(count).index_add_(0, place, first)
        if self.fix.second_only:
            y = torch.zeros_like(y)
        self.y = y.clamp(min=0) if self.fix.attracting_only else y
        rows = second.new_zeros(count, len(place)).index_add_(0, place, second)
        self.c = loss.scale**2 * second.new_zeros(count, count).index_add_(1, place, rows)
        self._ends = PairEnds.of(self.i, self.j, u)

    def node_sums(self) -> NodeSums:
        """See :meth:`CosineDerivatives.node_sums`."""
        at_ends = self.y[self._ends.pair]
        degree = self._ends.gathered(at_ends.unsqueeze(0)).squeeze(0)
        neighbors = self._ends.spread(at_ends.unsqueeze(1)).squeeze(2)
        return NodeSums(degree, neighbors, ListedMoments(self._ends, self.c), self._summed_value.double())

    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        """See :meth:`CosineDerivatives.rows`; ``c`` is zero, since all second derivatives are in :meth:`roots`."""
        first, last, _ = columns.indices(self.n)
        y = self.u.new_zeros(stop - start, max(0, last - first))
        for inside, place in placed(self.i, self.j, slice(start, stop), slice(first, last)):
            y[place] = self.y[inside]
        return y, torch.zeros_like(y)

    def matmul(self, x: Tensor) -> Tensor:
        """See :meth:`CosineDerivatives.matmul`."""
        out, y = torch.zeros_like(x), self.y.unsqueeze(1)
        return out.index_add_(0, self.i, y * x[self.j]).index_add_(0, self.j, y * x[self.i])

    def second_matmul(self, t: Tensor) -> Tensor | None:
        """See :meth:`CosineDerivatives.second_matmul`."""
        along = self._ends.along(t)
        change = along.new_zeros(len(self.y), along.shape[1]).index_add_(0, self._ends.pair, along)
        # Less what is between a point and itself.
        between = (self.c @ change)[self._ends.pair] - self._ends.coupled(self.c, along)
        return self._ends.spread(between)

    def roots(self, rows: slice, columns: slice) -> CrossRoots | None:
        """See :meth:`CosineDerivatives.roots`; all of the second derivatives, as eigenvectors."""
        signs, vectors = self._eigenvectors
        if not len(signs):
            return None
        ends = [slice(*chosen.indices(self.n)[:2]) for chosen in (rows, columns)]
        sides = [ListedVectors.at(self._ends[chosen], vectors, self.c) for chosen in ends]
        low, high = max(ends[0].start, ends[1].start), min(ends[0].stop, ends[1].stop)
        same = torch.arange(low, max(low, high), device=self.u.device)
        return CrossRoots(signs, sides[0], sides[1], same - ends[0].start, same - ends[1].start)

    @cached_property
    def _eigenvectors(self) -> tuple[Tensor, Tensor]:
        """Return signs (A,) and vectors (A, P) whose squares add up to ``C``; zero at pairs that nothing moves."""
        active = (self.c != 0).any(1).nonzero().flatten()
        values, vectors = torch.linalg.eigh(self.c[active][:, active])
        size = values.abs().max() if len(values) else values.sum()
        kept = values.abs() > torch.finfo(values.dtype).eps * size
        out = values.new_zeros(int(kept.sum()), len(self.y))
        out[:, active] = (vectors[:, kept] * values[kept].abs().sqrt()).T
        return values[kept].sign(), out


def _moments(shares: Tensor, none: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean (K,) and covariance (K, K) of ``e_l - e_k`` under the shares (K, K) of comparisons (k, l).

    The differences are counted from that of the largest share, so that a softmax that is nearly all one comparison
    loses no digits; ``none`` is the share of no comparison, whose difference is zero.
    """
    count = len(shares)
    origin = shares.new_zeros(count)
    others, rest = shares, torch.zeros_like(none)
    top = shares.flatten().argmax() if count else None
    if top is not None and bool(shares.flatten()[top] > none):
        origin[top % count] += 1
        origin[top // count] -= 1
        others = shares.flatten().index_fill(0, top, 0.0).view_as(shares)
        rest = others.sum() + none
    mean = others.sum(0) - others.sum(1)
    moved = mean - rest * origin
    mixed = mean.unsqueeze(1) * origin
    second = (others.sum(0) + others.sum(1)).diag() - others - others.T
    second = second - mixed - mixed.T + rest * origin.unsqueeze(1) * origin - moved.unsqueeze(1) * moved
    return shares.sum(0) - shares.sum(1), second


_ROWS = 256
"""Ends whose couplings are formed at once."""


@dataclass(frozen=True)
class PairEnds:
    """E ends of pairs, in the order of their points.

    Args:
        points: Number R of points.
        point: Where an end is, shape (E,).
        pair: Which pair it belongs to, shape (E,).
        other: The unit embedding at the other end, shape (E, D).
    """

    points: int
    point: Tensor
    pair: Tensor
    other: Tensor

    @classmethod
    def of(cls, i: Tensor, j: Tensor, u: Tensor) -> PairEnds:
        """Make both ends of P pairs of points (i, j), each (P,), with unit embeddings (N, D)."""
        point, other = torch.cat([i, j]), torch.cat([j, i])
        order = point.argsort(stable=True)
        pair = torch.arange(len(i), device=i.device).repeat(2)
        return cls(len(u), point[order], pair[order], u[other[order]])

    def __getitem__(self, points: slice) -> PairEnds:
        low, high, _ = points.indices(self.points)
        inside = slice(self._before(low), self._before(high))
        return PairEnds(max(0, high - low), self.point[inside] - low, self.pair[inside], self.other[inside])

    def along(self, t: Tensor) -> Tensor:
        """Return ``o_e . t_ek`` for ``t`` of shape (R, D, K), shape (E, K)."""
        found = [(self.other * t[self.point, :, k]).sum(1) for k in range(t.shape[2])]
        return torch.stack(found, dim=1) if found else self.other[:, :0]

    def spread(self, x: Tensor) -> Tensor:
        """Return ``sum_e x_ek o_e`` over the ends at every point, for ``x`` of shape (E, K); shape (R, D, K)."""
        out = x.new_zeros(self.points, self.other.shape[1], x.shape[1])
        for k in range(x.shape[1]):
            out[..., k].index_add_(0, self.point, x[:, k : k + 1] * self.other)
        return out

    def gathered(self, x: Tensor) -> Tensor:
        """Return sums over the ends at every point, from (A, E) to (A, R)."""
        return x.new_zeros(len(x), self.points).index_add_(1, self.point, x)

    def coupled(self, c: Tensor, x: Tensor) -> Tensor:
        """Return ``sum_f C_ef x_f`` over the ends f at the same point as e, for ``x`` of shape (E, K)."""
        found = [block @ x[columns] for columns, block in self.couplings(c)]
        return torch.cat(found) if found else torch.zeros_like(x)

    def couplings(self, c: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over blocks of ends e: the ends f, and ``C_ef`` where both are at one point, zero elsewhere."""
        for start in range(0, len(self.point), _ROWS):
            rows = slice(start, min(start + _ROWS, len(self.point)))
            low, high = int(self.point[rows.start]), int(self.point[rows.stop - 1])
            columns = slice(self._before(low), self._before(high + 1))
            here = self.point[rows].unsqueeze(1) == self.point[columns]
            yield columns, c[self.pair[rows].unsqueeze(1), self.pair[columns]] * here

    def _before(self, point: int) -> int:
        """Return the number of ends at points in front of this one."""
        return int(torch.searchsorted(self.point, point))


@dataclass(frozen=True)
class ListedMoments(Moments):
    """``M_i = sum_{k, l at i} C_kl o_ik o_il^T``.

    Args:
        ends: At the points.
        c: ``C``, shape (P, P).
    """

    ends: PairEnds
    c: Tensor

    def __getitem__(self, rows: slice) -> ListedMoments:
        return ListedMoments(self.ends[rows], self.c)

    def dense(self) -> Tensor:
        """See :meth:`Moments.dense`."""
        other, dim = self.ends.other, self.ends.other.shape[1]
        mixed = self.ends.coupled(self.c, other)
        out = other.new_zeros(self.ends.points, dim, dim)
        for some in row_ranges(len(other), dim**2):
            out.index_add_(0, self.ends.point[some], other[some].unsqueeze(2) * mixed[some].unsqueeze(1))
        return out

    def matmul(self, x: Tensor) -> Tensor:
        """See :meth:`Moments.matmul`."""
        return self.ends.spread(self.ends.coupled(self.c, self.ends.along(x)))

    def diagonal(self, u: Tensor) -> Tensor:
        """See :meth:`Moments.diagonal`."""
        tangent = project_tangent(u[self.ends.point], self.ends.other)
        product = tangent * self.ends.coupled(self.c, tangent)
        return torch.zeros_like(u).index_add_(0, self.ends.point, product)

    def gram(self, u: Tensor, scale: Tensor) -> Tensor:
        """See :meth:`Moments.gram`."""
        tangent = project_tangent(u[self.ends.point], self.ends.other)
        return (tangent * scale[self.ends.point].unsqueeze(1)).T @ self.ends.coupled(self.c, tangent)

    def bound(self) -> Tensor:
        """See :meth:`Moments.bound`."""
        found = [block.abs().sum(1) for _, block in self.ends.couplings(self.c)]
        return self.ends.gathered(torch.cat(found).unsqueeze(0) if found else self.c.new_zeros(1, 0)).squeeze(0)


@dataclass(frozen=True)
class ListedVectors(PointVectors):
    """Vectors over pairs, ``C = sum_a sign_a v_a v_a^T``, as vectors over the outputs of some points.

    Args:
        ends: At the points.
        vectors: ``v``, shape (A, P).
        c: ``C``, shape (P, P).
        weights: See :class:`~contrastive_curvature.hessian.cross.PointVectors`.
    """

    ends: PairEnds
    vectors: Tensor
    c: Tensor
    weights: Tensor

    @classmethod
    def at(cls, ends: PairEnds, vectors: Tensor, c: Tensor) -> ListedVectors:
        """Make the same without the weights."""
        return cls(ends, vectors, c, ends.gathered(vectors[:, ends.pair].abs()))

    def along(self, t: Tensor) -> Tensor:
        """See :meth:`PointVectors.along`."""
        return self.ends.gathered(self.vectors[:, self.ends.pair] * self.ends.along(t.unsqueeze(2)).T)

    def summed(self, t: Tensor) -> Tensor:
        """See :meth:`PointVectors.summed`."""
        along = self.ends.along(t)
        change = along.new_zeros(self.vectors.shape[1], along.shape[1]).index_add_(0, self.ends.pair, along)
        return self.vectors @ change

    def spread(self, x: Tensor) -> Tensor:
        """See :meth:`PointVectors.spread`."""
        return self.ends.spread((self.vectors.T @ x)[self.ends.pair])

    def blockwise(self, t: Tensor, signs: Tensor, points: Tensor) -> Tensor:
        """See :meth:`PointVectors.blockwise`."""
        del signs  # they are part of C
        return ListedMoments(self.ends, self.c).matmul(t)[points]
