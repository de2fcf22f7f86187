"""The symmetric weight matrix ``Y`` of a set of points, never held whole: rows are made in blocks and used up.

This is the only file that turns a relation and embeddings into pair weights. ``Y`` treats the margin mask as constant,
as the derivative of the loss does everywhere but on the margin itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from contrastive_curvature.losses.label_sums import CHUNK_ROWS, LabelColumns
from contrastive_curvature.losses.weighting import PairFactors, Shares, count_shares
from contrastive_curvature.options import CurvatureOptions, PDFix
from contrastive_curvature.pairs.edges import EdgeRelation
from contrastive_curvature.pairs.relation import (
    BLOCK_ELEMENTS,
    LabelRelation,
    Relation,
    TargetRelation,
)

__all__ = ["PairWeights", "total_sums"]


class PairWeights:
    """``Y`` (N, N): symmetric, zero diagonal, positive where a pair attracts, negative where it repels.

    Args:
        relation: Which pairs are positive and negative.
        u: Unit embeddings, shape (N, D).
        options: The curvature options; ``pd_fix="positive"`` drops the negatives.
        scale: Extra factors of positives and negatives (Proposition B.1).
    """

    def __init__(
        self, relation: Relation, u: Tensor, options: CurvatureOptions, scale: tuple[float, float] = (1.0, 1.0)
    ) -> None:
        self.relation = relation
        self.u = u
        self.n = relation.n
        self.options = options
        self.scale = scale
        self.factors = PairFactors.from_options(options, scale)
        positive, negative = relation.counts()
        self.totals = (positive.sum().item() / 2, negative.sum().item() / 2)
        self.shares = count_shares(positive, negative, options.normalization, u.dtype, self.totals)
        self._label_columns: LabelColumns | None = None
        self._summed: tuple[Tensor, Tensor] | None = None

    def row_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Stream ``Y`` as ``(rows, Y[rows])`` with blocks of bounded size."""
        for rows, positive, negative in self.relation.row_blocks():
            cosine = self.u[rows] @ self.u.T
            yield rows, self.factors.weigh(positive, negative, cosine, self.shares[rows], self.shares)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows ``start..stop`` of ``Y``, shape (stop - start, N)."""
        positive, negative = self.relation.rows(start, stop)
        cosine = self.u[start:stop] @ self.u.T
        return self.factors.weigh(positive, negative, cosine, self.shares[start:stop], self.shares)

    def dense(self) -> Tensor:
        """``Y`` as a matrix (N, N); for small N."""
        if isinstance(self.relation, EdgeRelation):
            out = self.u.new_zeros(self.n, self.n)
            for i, j, y in self._listed_edges(self.relation):
                out[i, j] = y
                out[j, i] = y
            return out
        blocks = [y for _, y in self.row_blocks()]
        return torch.cat(blocks) if blocks else self.u.new_zeros(0, 0)

    def matmul(self, x: Tensor) -> Tensor:
        """``Y x`` for ``x`` of shape (N, C)."""
        out = torch.zeros_like(x)
        if isinstance(self.relation, EdgeRelation):
            step = max(1, BLOCK_ELEMENTS // max(1, x.shape[1]))
            for i, j, y in self._listed_edges(self.relation, step):
                out.index_add_(0, i, y.unsqueeze(1) * x[j])
                out.index_add_(0, j, y.unsqueeze(1) * x[i])
            return out
        for rows, y in self.row_blocks():
            out[rows] = y @ x
        return out

    def node_sums(self) -> tuple[Tensor, Tensor]:
        """Degrees ``d_i = sum_j y_ij`` (N,) and pulls ``s_i = sum_j y_ij u_j`` (N, D); float64 for class labels."""
        if isinstance(self.relation, LabelRelation):
            d, s = self._columns(self.relation).node_sums(self.u, self.relation.targets)
        else:
            sums = self.matmul(torch.cat([torch.ones_like(self.u[:, :1]), self.u], dim=1))
            d, s = sums[:, 0], sums[:, 1:]
        # The loss is made of these two numbers, and is often asked for next.
        self._summed = total_sums(self.u, d, s)
        return d, s

    def sums_for(self, u: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Degrees and pulls of points of this set that arrive again, in any order.

        Args:
            u: Unit embeddings of B of the points, shape (B, D).
            targets: Their targets, shape (B, ...).

        Returns:
            ``d`` (B,) and ``s`` (B, D), the point itself left out; float64 for class labels.
        """
        relation = self._target_relation()
        if isinstance(relation, LabelRelation):
            return self._columns(relation).node_sums(u, targets)
        shares, itself = self.shares_for(targets), self.self_weights(targets)
        step = max(1, BLOCK_ELEMENTS // max(1, self.n))
        d, s = [], []
        for start in range(0, u.shape[0], step):
            rows = slice(start, start + step)
            positive, negative = relation.relate(targets[rows], relation.targets)
            y = self.factors.weigh(positive, negative, u[rows] @ self.u.T, shares[rows], self.shares)
            d.append(y.sum(1) - itself[rows])
            s.append(y @ self.u - itself[rows].unsqueeze(1) * u[rows])
        return torch.cat(d), torch.cat(s)

    def between(self, u_a: Tensor, targets_a: Tensor, u_b: Tensor, targets_b: Tensor) -> Tensor:
        """Weights (A, B) between points of this set; a point that is on both sides meets itself."""
        positive, negative = self._target_relation().relate(targets_a, targets_b)
        shares_a, shares_b = self.shares_for(targets_a), self.shares_for(targets_b)
        return self.factors.weigh(positive, negative, u_a @ u_b.T, shares_a, shares_b)

    def self_weights(self, targets: Tensor) -> Tensor:
        """What :meth:`between` gives where a point meets itself, shape (B,)."""
        positive, negative = self._target_relation().self_relation(targets)
        shares = self.shares_for(targets)
        return self.factors.positive * shares.positive * positive - self.factors.negative * shares.negative * negative

    def shares_for(self, targets: Tensor) -> Shares:
        """Shares of points of this set, found again by their targets."""
        relation = self._target_relation()
        if isinstance(relation, LabelRelation):
            return self._columns(relation).shares_for(targets)
        itself = relation.self_relation(targets)
        step = max(1, BLOCK_ELEMENTS // max(1, self.n))
        counts = [
            torch.stack([mask.sum(1) for mask in relation.relate(targets[k : k + step], relation.targets)])
            for k in range(0, targets.shape[0], step)
        ]
        positive, negative = torch.cat(counts, dim=1) - torch.stack(itself).long()
        return count_shares(positive, negative, self.options.normalization, self.u.dtype, self.totals)

    def loss_and_cost(self) -> tuple[Tensor, Tensor]:
        """Value of the contrastive loss of these pairs, without a graph, and its non-negative version.

        The ``positive`` fix drops the repelling pairs from the curvature, not from the loss.

        Returns:
            The loss of :class:`~contrastive_curvature.ContrastiveLoss`, and the cost: the same where there is a margin;
            without one, every repelling pair is counted from the largest distance, 2, as
            ``(4 - |u_i - u_j|^2) / 2``.
        """
        if self.options.pd_fix is PDFix.POSITIVE:
            complete = replace(self.options, pd_fix=PDFix.FIXED)
            return PairWeights(self.relation, self.u, complete, self.scale).loss_and_cost()
        if self._summed is None:
            self.node_sums()
        return self.loss_and_cost_of(*(self._summed or ()))

    def loss_and_cost_of(self, degree: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
        """The same from what :func:`total_sums` gives, where that is there already."""
        dtype = self.u.dtype
        value = (degree - pull) / 2
        if not self.factors.negative:
            return value.to(dtype), value.to(dtype)
        attract = self.factors.positive * (self.shares.positive.double() * self.relation.counts()[0]).sum()
        repelling = (attract - degree) / 2
        margin = self.factors.margin
        cost = value + (2 if margin is None else margin**2 / 2) * repelling
        return (value if margin is None else cost).to(dtype), cost.to(dtype)

    def _listed_edges(self, relation: EdgeRelation, step: int | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        step = step or max(1, BLOCK_ELEMENTS // max(1, self.u.shape[1]))
        for start in range(0, relation.i.numel(), step):
            chunk = slice(start, start + step)
            i, j = relation.i[chunk], relation.j[chunk]
            cosine = (self.u[i] * self.u[j]).sum(1)
            y = self.factors.weigh(
                relation.positive[chunk], relation.negative[chunk], cosine, self.shares[i], self.shares[j]
            )
            keep = y != 0
            yield i[keep], j[keep], y[keep]

    def _columns(self, relation: LabelRelation) -> LabelColumns:
        if self._label_columns is None:
            self._label_columns = LabelColumns(self.u, relation.targets, self.factors, self.shares)
        return self._label_columns

    def _target_relation(self) -> TargetRelation:
        if not isinstance(self.relation, TargetRelation):
            msg = "Points of a listed or masked relation have no target to be found again by."
            raise TypeError(msg)
        return self.relation


def total_sums(u: Tensor, d: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """``sum_i d_i`` and ``sum_i u_i . s_i`` over N points in float64: the loss is half their small difference."""
    pairs = zip(u.split(CHUNK_ROWS), s.split(CHUNK_ROWS), strict=True)
    return d.double().sum(), sum(((a.double() * b.double()).sum() for a, b in pairs), start=s.new_zeros(()).double())
