"""CoSENT: pairs with grades of similarity, whose cosines should have the order of the grades."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.hessian.cross import PointVectors
from contrastive_curvature.hessian.derivatives import CosineDerivatives, NodeSums
from contrastive_curvature.hessian.moments import Moments
from contrastive_curvature.hessian.sphere import normalize, project_tangent
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.losses.sides import joined_towers
from contrastive_curvature.options import Distance, PDFix
from contrastive_curvature.pairs import Pairs
from contrastive_curvature.pairs.edges import GradedPairs


class CoSENTLoss(CosineLoss):
    r"""CoSENT: compares the cosines of any two pairs with different grades, for a whole batch at once.

    With the cosine ``s_k`` and the grade ``y_k`` of each of K listed pairs, and the scale ``a``:

    .. math::
        L = \log \Big( 1 + \sum_{(k, l) : y_k > y_l} e^{a (s_l - s_k)} \Big)

    Only the order of the grades counts; with fewer than two different grades, the loss is zero. The loss is one number
    for a batch, not a mean over pairs, and a fit of a posterior sums it over batches.

    The second derivatives couple all pairs with each other, in a positive semidefinite matrix (K, K) that is stored in
    memory. The loss is ``CoSENTLoss`` of sentence-transformers.

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

    @override
    def relate(self, z: Tensor, labels: Tensor | None, pairs: Pairs | None) -> GradedPairs:
        wanted = "(a, b, grades): two points and a grade for every pair"
        if labels is not None:
            raise InputError("labels", "None", "labels", f"Pass pairs={wanted}.")
        if not isinstance(pairs, (tuple, list)):
            raise InputTypeError("pairs", wanted, "None" if pairs is None else f"a {type(pairs).__name__}")
        if len(pairs) != 3:
            raise InputError("pairs", wanted, f"a tuple of {len(pairs)}")
        return GradedPairs(*pairs, len(z), z.device)

    def between(self, z_a: Tensor, z_b: Tensor, grades: Tensor) -> Tensor:
        """Compute the loss of pairs of two towers.

        The output Hessian of this loss is the Hessian at ``torch.cat([z_a, z_b])`` with
        ``pairs=(arange(K), arange(K, 2 * K), grades)``.

        Args:
            z_a: Raw or normalised embeddings of the first points, shape (K, D).
            z_b: Embeddings of the second points, in the same order, shape (K, D).
            grades: Shape (K,).

        Returns:
            A scalar.

        Raises:
            InputError: The towers have different shapes, or the grades are malformed.
        """
        z, _, count = joined_towers(z_a, z_b)
        index = torch.arange(len(z), device=z.device)
        return self._at(normalize(z)[0], self.relate(z, None, (index[:count], index[count:], grades)))

    @override
    def derivatives(self, relation: GradedPairs, u: Tensor) -> CoSENTDerivatives:
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
    """``y`` (N, N) and second derivatives ``C`` (P, P) of a :class:`~contrastive_curvature.losses.cosent.CoSENTLoss`.

    P is the number of different pairs among the K listed pairs. The matrices are stored whole, since the pairs come
    from one batch.

    Args:
        loss: The loss.
        pairs: The listed pairs.
        u: Unit embeddings, shape (N, D).
    """

    def __init__(self, loss: CoSENTLoss, pairs: GradedPairs, u: Tensor) -> None:
        self.u, self.n = u, len(u)
        self.anchors = self.n
        low, high = torch.minimum(pairs.a, pairs.b), torch.maximum(pairs.a, pairs.b)
        keys, place = (low * self.n + high).unique(return_inverse=True)
        i, j, count = keys // max(1, self.n), keys % max(1, self.n), len(keys)
        shares, none, self._summed_value = loss.shares((u[low] * u[high]).sum(1), pairs.grades)
        first, second = _moments(shares, none)
        y = -loss.scale * first.new_zeros(count).index_add_(0, place, first)
        if loss.pd_fix.second_only:
            y = torch.zeros_like(y)
        if loss.pd_fix.attracting_only:
            y = y.clamp(min=0)
        self._y = u.new_zeros(self.n, self.n).index_put_((torch.cat([i, j]), torch.cat([j, i])), y.repeat(2))
        rows = second.new_zeros(count, len(place)).index_add_(0, place, second)
        self._c = loss.scale**2 * second.new_zeros(count, count).index_add_(1, place, rows)
        self._ends = PairEnds.of(i, j, u, self._c)

    @override
    def node_sums(self) -> NodeSums:
        return NodeSums(self._y.sum(1), self._y @ self.u, self._ends, self._summed_value.double())

    def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        """See :meth:`CosineDerivatives.rows`; all second derivatives are in :meth:`squares`."""
        return self._y[start:stop, columns], None

    @override
    def matmul(self, t: Tensor) -> Tensor:
        along = self._ends.along(t)
        change = along.new_zeros(len(self._c), along.shape[1]).index_add_(0, self._ends.pair, along)
        # Without the part between a point and itself.
        second = self._ends.spread((self._c @ change)[self._ends.pair] - self._ends.c @ along)
        return super().matmul(t) + second

    def squares(self, points: slice) -> tuple[Tensor, PointVectors] | None:
        """See :meth:`CosineDerivatives.squares`; all second derivatives, as eigenvectors."""
        signs, vectors = self._eigenvectors
        return (signs, ListedVectors(self._ends[points], vectors)) if len(signs) else None

    @cached_property
    def _eigenvectors(self) -> tuple[Tensor, Tensor]:
        """Return signs (A,) and vectors (A, P) with squares that add up to ``C``; zero at zero rows of ``C``."""
        active = (self._c != 0).any(1).nonzero().flatten()
        values, vectors = torch.linalg.eigh(self._c[active][:, active])
        size = values.abs().max() if len(values) else values.sum()
        kept = values.abs() > torch.finfo(values.dtype).eps * size
        out = values.new_zeros(int(kept.sum()), len(self._c))
        out[:, active] = (vectors[:, kept] * values[kept].abs().sqrt()).T
        return values[kept].sign(), out


def _moments(shares: Tensor, none: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean (K,) and covariance (K, K) of ``e_l - e_k`` under the shares (K, K) of comparisons (k, l).

    The differences are measured from the difference with the largest share, so that a softmax concentrated on one
    comparison loses no digits; ``none`` is the share of "no comparison", with difference zero.
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


@dataclass(frozen=True)
class PairEnds(Moments):
    """Both ends of P pairs, in the order of their points, and the moments ``M_i = sum_{k, l at i} C_kl o_ik o_il^T``.

    Args:
        points: Number R of points.
        point: Point of each end, shape (E,).
        pair: Pair of each end, shape (E,).
        other: ``o``, the unit embedding at the other end, shape (E, D).
        c: ``C`` between the pairs of two ends at the same point, zero elsewhere, shape (E, E).
    """

    points: int
    point: Tensor
    pair: Tensor
    other: Tensor
    c: Tensor

    @classmethod
    def of(cls, i: Tensor, j: Tensor, u: Tensor, c: Tensor) -> PairEnds:
        """Make both ends of the pairs (i, j), each (P,), with unit embeddings (N, D) and ``C`` (P, P)."""
        point, order = torch.cat([i, j]).sort(stable=True)
        pair = torch.arange(len(i), device=i.device).repeat(2)[order]
        here = point.unsqueeze(1) == point
        return cls(len(u), point, pair, u[torch.cat([j, i])[order]], c[pair][:, pair] * here)

    def __getitem__(self, rows: slice) -> PairEnds:
        low, high, _ = rows.indices(self.points)
        start, stop = (int(torch.searchsorted(self.point, end)) for end in (low, high))
        inside = slice(start, stop)
        point = self.point[inside] - low
        return PairEnds(max(0, high - low), point, self.pair[inside], self.other[inside], self.c[inside, inside])

    def along(self, t: Tensor) -> Tensor:
        """Return ``o_e . t_ek`` for ``t`` of shape (R, D, K), shape (E, K)."""
        return torch.einsum("ed,edk->ek", self.other, t[self.point])

    def spread(self, x: Tensor) -> Tensor:
        """Return ``sum_e x_ek o_e`` over the ends at every point, for ``x`` of shape (E, K); shape (R, D, K)."""
        out = x.new_zeros(self.points, self.other.shape[1], x.shape[1])
        return out.index_add_(0, self.point, self.other.unsqueeze(2) * x.unsqueeze(1))

    @override
    def dense(self) -> Tensor:
        return self.spread(self.c @ self.other)

    @override
    def matmul(self, x: Tensor) -> Tensor:
        return self.spread(self.c @ self.along(x))

    @override
    def diagonal(self, u: Tensor) -> Tensor:
        tangent = project_tangent(u[self.point], self.other)
        return torch.zeros_like(u).index_add_(0, self.point, tangent * (self.c @ tangent))

    @override
    def gram(self, u: Tensor, scale: Tensor) -> Tensor:
        tangent = project_tangent(u[self.point], self.other)
        return (tangent * scale[self.point].unsqueeze(1)).T @ (self.c @ tangent)

    @override
    def bound(self) -> Tensor:
        return self.c.new_zeros(self.points).index_add_(0, self.point, self.c.abs().sum(1))


@dataclass(frozen=True)
class ListedVectors(PointVectors):
    """Vectors over pairs, ``C = sum_a sign_a v_a v_a^T``, as vectors over the outputs of some points.

    Args:
        ends: Ends of the pairs at the points.
        vectors: ``v``, shape (A, P).
    """

    ends: PairEnds
    vectors: Tensor

    @override
    def along(self, t: Tensor) -> Tensor:
        along = self.vectors[:, self.ends.pair] * self.ends.along(t.unsqueeze(2)).T
        return along.new_zeros(len(along), self.ends.points).index_add_(1, self.ends.point, along)

    @override
    def summed(self, t: Tensor) -> Tensor:
        return self.vectors[:, self.ends.pair] @ self.ends.along(t)

    @override
    def spread(self, x: Tensor) -> Tensor:
        return self.ends.spread((self.vectors.T @ x)[self.ends.pair])

    def blockwise(self, t: Tensor, signs: Tensor) -> Tensor:
        """See :meth:`PointVectors.blockwise`; ``C`` already contains the signs."""
        return self.ends.matmul(t)
