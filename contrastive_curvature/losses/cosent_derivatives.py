"""The derivatives of CoSENT: pairs are listed, and the second derivatives couple any two of them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contrastive_curvature.hessian.cross import CrossRoots
from contrastive_curvature.hessian.derivatives import CosineDerivatives, NodeSums
from contrastive_curvature.losses.pair_ends import ListedMoments, ListedVectors, PairEnds
from contrastive_curvature.pairs.graded import GradedPairs

if TYPE_CHECKING:
    from contrastive_curvature.losses.cosent import CoSENTLoss

__all__ = ["CoSENTDerivatives"]


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
        for here, there in ((self.i, self.j), (self.j, self.i)):
            inside = (here >= start) & (here < stop) & (there >= first) & (there < last)
            y[here[inside] - start, there[inside] - first] = self.y[inside]
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
        """Signs (A,) and vectors (A, P) whose squares add up to ``C``; exactly zero at pairs that nothing moves."""
        active = (self.c != 0).any(1).nonzero().flatten()
        values, vectors = torch.linalg.eigh(self.c[active][:, active])
        size = values.abs().max() if len(values) else values.sum()
        kept = values.abs() > torch.finfo(values.dtype).eps * size
        out = values.new_zeros(int(kept.sum()), len(self.y))
        out[:, active] = (vectors[:, kept] * values[kept].abs().sqrt()).T
        return values[kept].sign(), out


def _moments(shares: Tensor, none: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (K,) and covariance (K, K) of ``e_l - e_k`` under the shares of the comparisons (k, l).

    The differences are counted from that of the largest share, so that a softmax that is nearly all one comparison
    loses no digits.

    Args:
        shares: Shape (K, K).
        none: Share of no comparison, whose difference is zero.
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
