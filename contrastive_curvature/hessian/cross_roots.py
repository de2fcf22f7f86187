"""Squares that couple all candidates of an anchor, between some of the points and others; never formed.

A softmax over the candidates j of an anchor i has the second derivative ``diag(c_i) - sum_r q_ri q_ri^T`` in the
cosines. Its diagonal is about single pairs; every square ``q_ri q_ri^T`` is one vector over all outputs, with the entry

``W_rib = [ q_rib P_b u_i + (b = i) P_i sum_j q_rij u_j ] / n_b``

at point b, and adds ``sign_r W_rib W_rib'^T`` to the block of every two points.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.pairs.relation import BLOCK_ELEMENTS

__all__ = ["CrossRoots", "PointVectors", "RootSide"]


class PointVectors(ABC):
    """Entries ``W_ab`` of A vectors at some points (R of them), before the projection and the norm of a point.

    Attributes:
        weights: Zero where a vector has no entry at a point, shape (A, R).
    """

    weights: Tensor

    @abstractmethod
    def along(self, t: Tensor) -> Tensor:
        """``W_ab . t_b`` for tangents ``t`` (R, D), already divided by the norms, shape (A, R)."""

    @abstractmethod
    def summed(self, t: Tensor) -> Tensor:
        """``sum_b W_ab . t_bk`` for ``t`` of shape (R, D, K), shape (A, K)."""

    @abstractmethod
    def spread(self, x: Tensor) -> Tensor:
        """``sum_a W_ab x_ak`` for ``x`` of shape (A, K), before the projection and the norm, shape (R, D, K)."""

    @abstractmethod
    def blockwise(self, t: Tensor, signs: Tensor, points: Tensor) -> Tensor:
        """``sum_a sign_a W_ab (W_ab . t_bk)``, as in :meth:`spread`, for some of the points alone.

        Args:
            t: Tangents at all R points, already divided by the norms, shape (R, D, K).
            signs: Shape (A,).
            points: Which of them, shape (O,).

        Returns:
            Shape (O, D, K).
        """


@dataclass(frozen=True)
class RootSide(PointVectors):
    """Entries of vectors that belong to one anchor each.

    Args:
        anchors: ``u_i`` of the anchor that each vector belongs to, shape (A, D).
        weights: ``q``, shape (A, R).
        own: For the points that are anchors themselves: the vector, the point and ``sum_j q_ij u_j``, shapes (O,), (O,)
            and (O, D).
    """

    anchors: Tensor
    weights: Tensor
    own: tuple[Tensor, Tensor, Tensor]

    def along(self, t: Tensor) -> Tensor:
        """See :meth:`PointVectors.along`."""
        out = self.weights * (self.anchors @ t.T)
        vector, point, own = self.own
        return out.index_put_((vector, point), (own * t[point]).sum(1), accumulate=True)

    def summed(self, t: Tensor) -> Tensor:
        """See :meth:`PointVectors.summed`."""
        dim, columns = t.shape[1:]
        out = t.new_zeros(self.weights.shape[0], columns)
        step = max(1, BLOCK_ELEMENTS // max(1, dim * columns))
        for start in range(0, len(out), step):
            some = slice(start, start + step)
            moved = (self.weights[some] @ t.flatten(1)).view(-1, dim, columns)
            out[some] = torch.einsum("ad,adk->ak", self.anchors[some], moved)
        vector, point, own = self.own
        return out.index_add_(0, vector, torch.einsum("od,odk->ok", own, t[point]))

    def spread(self, x: Tensor) -> Tensor:
        """See :meth:`PointVectors.spread`."""
        points, dim = self.weights.shape[1], self.anchors.shape[1]
        out = x.new_zeros(points, dim * x.shape[1])
        step = max(1, BLOCK_ELEMENTS // max(1, dim * x.shape[1]))
        for start in range(0, len(x), step):
            some = slice(start, start + step)
            outer = (self.anchors[some].unsqueeze(2) * x[some].unsqueeze(1)).flatten(1)
            out.addmm_(self.weights[some].T, outer)
        vector, point, own = self.own
        return out.view(points, dim, x.shape[1]).index_add_(0, point, own.unsqueeze(2) * x[vector].unsqueeze(1))

    def blockwise(self, t: Tensor, signs: Tensor, points: Tensor) -> Tensor:
        """See :meth:`PointVectors.blockwise`."""
        out = t.new_zeros(len(points), *t.shape[1:])
        vector, point, own = self.own
        for k in range(t.shape[2]):
            x = signs.unsqueeze(1) * self.along(t[..., k])[:, points]
            out[..., k] = (x * self.weights[:, points]).T @ self.anchors
            place = torch.full((self.weights.shape[1],), -1, device=points.device)
            place[points] = torch.arange(len(points), device=points.device)
            mine = place[point] >= 0
            at = place[point[mine]]
            out[..., k].index_add_(0, at, own[mine] * x[vector[mine], at].unsqueeze(1))
        return out


@dataclass(frozen=True)
class CrossRoots:
    """The same vectors at the rows and at the columns of cross blocks.

    Args:
        signs: Shape (A,).
        rows: At the rows.
        columns: At the columns.
        same_rows: Rows that are also among the columns, shape (O,): their blocks with themselves are left out.
        same_columns: Which columns they are, shape (O,).
    """

    signs: Tensor
    rows: PointVectors
    columns: PointVectors
    same_rows: Tensor
    same_columns: Tensor

    def matmul(self, t: Tensor) -> Tensor:
        """``sum_b W_b' (W_b . t_b)`` over columns other than the row itself.

        Args:
            t: Tangents at the columns, divided by the norms, shape (C, D, K).

        Returns:
            At the rows, before their projection and norm, shape (R, D, K).
        """
        out = self.rows.spread(self.signs.unsqueeze(1) * self.columns.summed(t))
        if len(self.same_rows):
            out[self.same_rows] -= self.columns.blockwise(t, self.signs, self.same_columns)
        return out

    def forms(self, a: Tensor, b: Tensor) -> Tensor:
        """``a_ik^T H_ij b_jk`` of tangents divided by the norms, (R, D, K) and (C, D, K); shape (K, R, C)."""
        out = a.new_empty(a.shape[2], a.shape[0], b.shape[0])
        for k in range(len(out)):
            left = self.signs.unsqueeze(1) * self.rows.along(a[..., k])
            torch.mm(left.T, self.columns.along(b[..., k]), out=out[k])
        out[:, self.same_rows, self.same_columns] = 0
        return out
