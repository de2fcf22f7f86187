"""The blocks ``H_ij`` between two points, in closed form, without storing their matrices.

For a loss of the cosines ``s_ij = u_i . u_j`` with the pair weights ``y_ij = -dL/ds_ij`` and the second derivatives
``c_ij = d2L/ds_ij^2``, both distances have

``H_ij = [ -y_ij P_i P_j + c_ij (P_i u_j) (P_j u_i)^T ] / (n_i n_j)``

and losses that compare all candidates of an anchor add squares: a softmax over the candidates j of an anchor i has the
second derivative ``diag(c_i) - sum_r q_ri q_ri^T`` in the cosines. Its diagonal belongs to single pairs; every square
``q_ri q_ri^T`` is one vector over all outputs, with the entry

``W_rib = [ q_rib P_b u_i + (b = i) P_i sum_j q_rij u_j ] / n_b``

at point b, and adds ``sign_r W_rib W_rib'^T`` to the block of every two points.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from contrastive_curvature.hessian.sphere import project_tangent
from contrastive_curvature.pairs.relation import row_ranges


def tangent_axes(u: Tensor, n: Tensor) -> Tensor:
    """Return ``P_i e_k / n_i`` for every output axis k, from directions (N, D) and norms (N,); shape (N, D, D)."""
    eye = torch.eye(u.shape[1], dtype=u.dtype, device=u.device)
    return (eye - u.unsqueeze(2) * u.unsqueeze(1)) / n.view(-1, 1, 1)


@dataclass(frozen=True)
class CrossBlocks:
    """``H_ij`` for R points i of one set (the rows) and C points j of another (the columns).

    A point in both sets forms a pair with itself, with its weight in ``y``.

    Args:
        u_rows: Unit embeddings, shape (R, D).
        n_rows: Norms of the outputs, shape (R,).
        u_columns: Unit embeddings, shape (C, D).
        n_columns: Norms of the outputs, shape (C,).
        y: Pair weights, shape (R, C).
        c: Second derivatives of the loss in the cosines, shape (R, C); ``None`` where they are zero.
        symmetric: Whether rows and columns are the same points in the same order.
        roots: Squares that couple the candidates of an anchor; ``None`` for losses of single pairs.
    """

    u_rows: Tensor
    n_rows: Tensor
    u_columns: Tensor
    n_columns: Tensor
    y: Tensor
    c: Tensor | None = None
    symmetric: bool = False
    roots: CrossRoots | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return ``(R, C)``."""
        return self.u_rows.shape[0], self.u_columns.shape[0]

    def matmul(self, v: Tensor) -> Tensor:
        """Return ``sum_j H_ij v_j`` for ``v`` of shape (C, D, K), shape (R, D, K)."""
        moved = project_tangent(self.u_columns, v) / self.n_columns.view(-1, 1, 1)
        out = -(self.y @ moved.flatten(1)).view(-1, *v.shape[1:])
        if self.c is not None:
            along = torch.einsum("rd,cdk->rck", self.u_rows, moved)
            out = out + torch.einsum("rck,cd->rdk", self.c.unsqueeze(2) * along, self.u_columns)
        if self.roots is not None:
            out = out + self.roots.matmul(moved)
        return project_tangent(self.u_rows, out) / self.n_rows.view(-1, 1, 1)

    def forms(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``a_ik^T H_ij b_jk``, shape (K, R, C), for vectors ``a`` (R, D, K) and ``b`` (C, D, K)."""
        tangents = (
            project_tangent(self.u_rows, a) / self.n_rows.view(-1, 1, 1),
            project_tangent(self.u_columns, b) / self.n_columns.view(-1, 1, 1),
        )
        a, b = tangents[0].permute(2, 0, 1), tangents[1].permute(2, 1, 0)
        out = (a @ b).mul_(-self.y)
        if self.roots is not None:
            out += self.roots.forms(*tangents)
        if self.c is not None:
            out += self.c * (a @ self.u_columns.T) * (self.u_rows @ b)
        return out

    def axis(self, k: int, cosine: Tensor | None = None) -> Tensor:
        """Return the entry ``(k, k)`` of every block, shape (R, C); a known ``cosine`` (R, C) saves its product."""
        cosine = self.cosine() if cosine is None else cosine
        x, y = self.u_rows[:, k, None], self.u_columns[:, k]
        first, second = self._scaled
        out = first * (cosine * (x * y) + (1 - x.square() - y.square()))
        out = out if second is None else out + second * (y - cosine * x) * (x - cosine * y)
        return out if self.roots is None else out + self.roots.forms(*self._axis(k))[0]

    def _axis(self, k: int) -> tuple[Tensor, Tensor]:
        """Return ``P e_k / n`` for the rows (R, D, 1) and for the columns (C, D, 1)."""
        out = []
        for u, n in ((self.u_rows, self.n_rows), (self.u_columns, self.n_columns)):
            axis = -u * u[:, k : k + 1]
            axis[:, k] += 1
            out.append((axis / n.unsqueeze(1)).unsqueeze(2))
        return out[0], out[1]

    @cached_property
    def _scaled(self) -> tuple[Tensor, Tensor | None]:
        """Return ``-y_ij / (n_i n_j)`` and ``c_ij / (n_i n_j)``, each (R, C)."""
        norms = self.n_rows.unsqueeze(1) * self.n_columns
        return -self.y / norms, None if self.c is None else self.c / norms

    def cosine(self) -> Tensor:
        """Return ``u_i . u_j``, shape (R, C)."""
        return self.u_rows @ self.u_columns.T

    def pairs(self) -> Tensor:
        """List row and column of each pair with a block, (K, 2); if symmetric, each pair once."""
        # Squares couple any two candidates of an anchor.
        present = self.y != 0 if self.roots is None else torch.ones_like(self.y, dtype=torch.bool)
        if self.c is not None:
            present = present | (self.c != 0)
        return (present.triu(1) if self.symmetric else present).nonzero()

    def itself(self) -> Tensor | None:
        """Return the diagonals of each row's block with itself, shape (R, D); ``None`` if they are zero."""
        if not self.symmetric or not bool(self.y.diagonal().any()):
            return None
        # ``c`` adds nothing here: P_i u_i = 0.
        weight = self.y.diagonal() / self.n_rows / self.n_rows
        return -weight.unsqueeze(1) * (1 - self.u_rows.square())

    def diagonals(self, i: Tensor, j: Tensor) -> Tensor:
        """Return the diagonals of the blocks ``H_ij`` for pairs ``i`` and ``j``, each (K,); shape (K, D)."""
        u, v = self.u_rows[i], self.u_columns[j]
        product = u * v
        cosine = product.sum(1, keepdim=True)
        norms = self.n_rows[i] * self.n_columns[j]
        second = None
        if self.c is not None:
            second = (self.c[i, j] / norms).unsqueeze(1) * (v - cosine * u) * (u - cosine * v)
        out = product.mul_(cosine).add_(1).sub_(u.square_()).sub_(v.square_())
        out *= -(self.y[i, j] / norms).unsqueeze(1)
        if second is not None:
            out.add_(second)
        if self.roots is not None:
            out += torch.stack([self.roots.forms(*self._axis(k))[0][i, j] for k in range(u.shape[1])], dim=1)
        return out


@dataclass(frozen=True)
class RootSide:
    """Entries ``W_ab`` of A vectors, each of one anchor, at R points, before the projection and the norm of a point.

    Args:
        anchors: ``u_i`` of the anchor that each vector belongs to, shape (A, D).
        weights: ``q``, shape (A, R).
        own: For points that are also anchors: the vector's index, the point's index and ``sum_j q_ij u_j``, shapes
            (O,), (O,) and (O, D).
    """

    anchors: Tensor
    weights: Tensor
    own: tuple[Tensor, Tensor, Tensor]

    def along(self, t: Tensor) -> Tensor:
        """Return ``W_ab . t_b`` for tangents ``t`` (R, D), already divided by the norms, shape (A, R)."""
        out = self.weights * (self.anchors @ t.T)
        vector, point, own = self.own
        return out.index_put_((vector, point), (own * t[point]).sum(1), accumulate=True)

    def summed(self, t: Tensor) -> Tensor:
        """Return ``sum_b W_ab . t_bk`` for ``t`` of shape (R, D, K), shape (A, K)."""
        dim, columns = t.shape[1:]
        out = t.new_zeros(self.weights.shape[0], columns)
        for some in row_ranges(len(out), dim * columns):
            moved = (self.weights[some] @ t.flatten(1)).view(-1, dim, columns)
            out[some] = torch.einsum("ad,adk->ak", self.anchors[some], moved)
        vector, point, own = self.own
        return out.index_add_(0, vector, torch.einsum("od,odk->ok", own, t[point]))

    def spread(self, x: Tensor) -> Tensor:
        """Return ``sum_a W_ab x_ak`` for ``x`` of shape (A, K), before projection and norm, shape (R, D, K)."""
        points, dim = self.weights.shape[1], self.anchors.shape[1]
        out = x.new_zeros(points, dim * x.shape[1])
        for some in row_ranges(len(x), dim * x.shape[1]):
            outer = (self.anchors[some].unsqueeze(2) * x[some].unsqueeze(1)).flatten(1)
            out.addmm_(self.weights[some].T, outer)
        vector, point, own = self.own
        return out.view(points, dim, x.shape[1]).index_add_(0, point, own.unsqueeze(2) * x[vector].unsqueeze(1))

    def blockwise(self, t: Tensor, signs: Tensor) -> Tensor:
        """Return ``sum_a sign_a W_ab (W_ab . t_bk)``, as in :meth:`spread`, shape (R, D, K)."""
        out = torch.zeros_like(t)
        vector, point, own = self.own
        for k in range(t.shape[2]):
            x = signs.unsqueeze(1) * self.along(t[..., k])
            out[..., k] = (x * self.weights).T @ self.anchors
            out[..., k].index_add_(0, point, own * x[vector, point].unsqueeze(1))
        return out


@dataclass(frozen=True)
class CrossRoots:
    """The same vectors at the rows and at the columns of cross blocks.

    Args:
        signs: Shape (A,).
        rows: The vectors at the rows.
        columns: The vectors at the columns.
        same_rows: Rows that are also columns, shape (O,): a point's block with itself is left out.
        same_columns: The columns of the same points, shape (O,).
    """

    signs: Tensor
    rows: RootSide
    columns: RootSide
    same_rows: Tensor
    same_columns: Tensor

    def matmul(self, t: Tensor) -> Tensor:
        """Return ``sum_b W_b' (W_b . t_b)`` over columns other than the row itself, before projection and norm.

        ``t`` are tangents at the columns, divided by the norms, shape (C, D, K); the result has shape (R, D, K).
        """
        out = self.rows.spread(self.signs.unsqueeze(1) * self.columns.summed(t))
        if len(self.same_rows):
            out[self.same_rows] -= self.columns.blockwise(t, self.signs)[self.same_columns]
        return out

    def forms(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``a_ik^T H_ij b_jk`` for tangents, divided by the norms, (R, D, K) and (C, D, K); shape (K, R, C)."""
        out = a.new_empty(a.shape[2], a.shape[0], b.shape[0])
        for k in range(len(out)):
            left = self.signs.unsqueeze(1) * self.rows.along(a[..., k])
            torch.mm(left.T, self.columns.along(b[..., k]), out=out[k])
        out[:, self.same_rows, self.same_columns] = 0
        return out
