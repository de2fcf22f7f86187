"""The blocks ``H_ij`` between two points, in closed form and never formed.

For a loss of the cosines ``s_ij = u_i . u_j`` with the pair weights ``y_ij = -dL/ds_ij`` and the second derivatives
``c_ij = d2L/ds_ij^2``, both distances have

``H_ij = [ -y_ij P_i P_j + c_ij (P_i u_j) (P_j u_i)^T ] / (n_i n_j)``

and losses that compare all candidates of an anchor add squares (:mod:`contrastive_curvature.hessian.cross_roots`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from contrastive_curvature.hessian.cross_roots import CrossRoots
from contrastive_curvature.hessian.sphere import project_tangent

__all__ = ["CrossBlocks", "tangent_axes"]


def tangent_axes(u: Tensor, n: Tensor) -> Tensor:
    """``P_i e_k / n_i`` for every output axis k, shape (N, D, D): row k of point i.

    Args:
        u: Unit embeddings, shape (N, D).
        n: Norms of the outputs, shape (N,).
    """
    eye = torch.eye(u.shape[1], dtype=u.dtype, device=u.device)
    return (eye - u.unsqueeze(2) * u.unsqueeze(1)) / n.view(-1, 1, 1)


@dataclass(frozen=True)
class CrossBlocks:
    """``H_ij`` for points i of one set (R of them, the rows) and j of another (C, the columns).

    Where a point stands in both sets, it is treated as a pair with itself, with whatever weight ``y`` has there.

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
        """``(R, C)``."""
        return self.u_rows.shape[0], self.u_columns.shape[0]

    def matmul(self, v: Tensor) -> Tensor:
        """``sum_j H_ij v_j``.

        Args:
            v: Shape (C, D, K).

        Returns:
            Shape (R, D, K).
        """
        moved = project_tangent(self.u_columns, v) / self.n_columns.view(-1, 1, 1)
        out = -(self.y @ moved.flatten(1)).view(-1, *v.shape[1:])
        if self.c is not None:
            along = torch.einsum("rd,cdk->rck", self.u_rows, moved)
            out = out + torch.einsum("rck,cd->rdk", self.c.unsqueeze(2) * along, self.u_columns)
        if self.roots is not None:
            out = out + self.roots.matmul(moved)
        return project_tangent(self.u_rows, out) / self.n_rows.view(-1, 1, 1)

    def forms(self, a: Tensor, b: Tensor) -> Tensor:
        """The numbers ``a_ik^T H_ij b_jk``.

        Args:
            a: Vectors of the rows, shape (R, D, K).
            b: Vectors of the columns, shape (C, D, K).

        Returns:
            Shape (K, R, C).
        """
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
        """The entry ``(k, k)`` of every block, shape (R, C).

        Args:
            k: The output axis.
            cosine: ``u_i . u_j``, shape (R, C), where the caller has it already.
        """
        cosine = self.cosine() if cosine is None else cosine
        x, y = self.u_rows[:, k, None], self.u_columns[:, k]
        first, second = self._scaled
        out = first * (cosine * (x * y) + (1 - x.square() - y.square()))
        out = out if second is None else out + second * (y - cosine * x) * (x - cosine * y)
        return out if self.roots is None else out + self.roots.forms(*self._axis(k))[0]

    def _axis(self, k: int) -> tuple[Tensor, Tensor]:
        """``P e_k / n`` of the rows (R, D, 1) and of the columns (C, D, 1)."""
        out = []
        for u, n in ((self.u_rows, self.n_rows), (self.u_columns, self.n_columns)):
            axis = -u * u[:, k : k + 1]
            axis[:, k] += 1
            out.append((axis / n.unsqueeze(1)).unsqueeze(2))
        return out[0], out[1]

    @cached_property
    def _scaled(self) -> tuple[Tensor, Tensor | None]:
        """``-y_ij / (n_i n_j)`` and ``c_ij / (n_i n_j)``, each (R, C): asked for once an output axis."""
        norms = self.n_rows.unsqueeze(1) * self.n_columns
        return -self.y / norms, None if self.c is None else self.c / norms

    def cosine(self) -> Tensor:
        """``u_i . u_j``, shape (R, C)."""
        return self.u_rows @ self.u_columns.T

    def pairs(self) -> Tensor:
        """Row and column of every pair with a block, shape (K, 2); each once where rows and columns are the same."""
        # Squares couple any two candidates of an anchor.
        present = self.y != 0 if self.roots is None else torch.ones_like(self.y, dtype=torch.bool)
        if self.c is not None:
            present = present | (self.c != 0)
        return (present.triu(1) if self.symmetric else present).nonzero()

    def itself(self) -> Tensor | None:
        """Diagonals of the blocks of a point with itself, shape (R, D); ``None`` where these are zero."""
        if not self.symmetric or not bool(self.y.diagonal().any()):
            return None
        # c has no part: P_i u_i = 0.
        weight = self.y.diagonal() / self.n_rows / self.n_rows
        return -weight.unsqueeze(1) * (1 - self.u_rows.square())

    def diagonals(self, i: Tensor, j: Tensor) -> Tensor:
        """Diagonals of the blocks of some pairs.

        Args:
            i: Rows, shape (K,).
            j: Columns, shape (K,).

        Returns:
            Shape (K, D).
        """
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
