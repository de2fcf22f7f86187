"""Closed form of the diagonal blocks ``H_ii`` for a loss that is linear in the cosines.

Every block, before and after its projection on the positive semidefinite cone, has the form

``H_ii = c P + p t t^T + q (u t^T + t u^T) + r u u^T``

with the tangent projector ``P = I - u u^T`` and a unit tangent ``t``, so products, diagonals, eigenvalues and square
roots cost O(D) per point instead of O(D^2) or O(D^3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature import waiting
from contrastive_curvature.hessian.blocks import Blocks, SignedFactor, UnrepresentableError, holds_curvature
from contrastive_curvature.hessian.sphere import project_tangent
from contrastive_curvature.options import Distance


@dataclass(frozen=True)
class NodeBlocks(Blocks):
    """N symmetric (D, D) blocks.

    Args:
        u: Unit embeddings, shape (N, D).
        t: Unit tangents (zero where the gradient of the loss is radial), shape (N, D).
        c: Weight of the projector, shape (N,).
        p: Weight of ``t t^T``.
        q: Weight of ``u t^T + t u^T``.
        r: Weight of ``u u^T``.
    """

    u: Tensor
    t: Tensor
    c: Tensor
    p: Tensor
    q: Tensor
    r: Tensor

    @classmethod
    def from_sums(cls, u: Tensor, n: Tensor, d: Tensor, s: Tensor, distance: Distance) -> NodeBlocks:
        """Build the blocks from the pair weights' degrees and neighbour sums.

        Args:
            u: Unit embeddings, shape (N, D).
            n: Norms of the raw outputs, shape (N,).
            d: ``sum_j y_ij``, shape (N,), in the dtype of ``u`` or a wider one.
            s: ``sum_j y_ij u_j``, shape (N, D), in the dtype of ``d``.
            distance: ``euclidean``: ``d P / n^2``. ``arccos``: ``(a P + u t^T + t u^T) / n^2`` with ``a = u . s`` and
                ``t = s - a u`` (paper, appendices F.1 and F.2, summed over the pairs of a point).
        """
        zero = torch.zeros_like(n)
        if distance is Distance.EUCLIDEAN:
            return cls(u, torch.zeros_like(u), d.to(n.dtype) / n / n, zero, zero, zero)._representable(n)
        wide = u.to(s.dtype)
        a = (wide * s).sum(1).to(n.dtype)
        # Projected twice: the first projection leaves a radial residue as large as the rounding error of s.
        t = project_tangent(u, project_tangent(wide, s).to(u.dtype))
        length = t.norm(dim=1)
        direction = t / torch.where(length > 0, length, torch.ones_like(length)).unsqueeze(1)
        # If s is along u, only rounding remains, which may also be along u: then the tangent is zero.
        direction = project_tangent(u, direction)
        tangent = direction.norm(dim=1)
        moves = tangent > 0.5
        direction = torch.where(moves.unsqueeze(1), direction / tangent.unsqueeze(1), 0.0)
        length = torch.where(moves, length, 0.0)
        return cls(u, direction, a / n / n, zero, length / n / n, zero)._representable(n)

    def _representable(self, n: Tensor) -> NodeBlocks:
        """Return these blocks if they are finite and did not lose digits to underflow."""
        info = torch.finfo(n.dtype)
        size = torch.maximum(self.c.abs(), self.q.abs())
        # Weights that already vanish in the loss (a far pair in a logistic loss) may lose digits, as may weights that
        # are negligible against other points' weights.
        weight = size * n * n
        floor = info.eps**2 * weight.max() if weight.numel() else info.tiny
        lost = (size > 0) & (size < info.tiny) & (weight >= floor) & (weight >= info.tiny)
        held = holds_curvature(n) & ~lost & size.isfinite()
        waiting.require(held.all(), partial(UnrepresentableError.at, n, held))
        return self

    def __getitem__(self, rows: slice) -> NodeBlocks:
        return NodeBlocks(self.u[rows], self.t[rows], self.c[rows], self.p[rows], self.q[rows], self.r[rows])

    @override
    def add_projector(self, weight: Tensor) -> NodeBlocks:
        return replace(self, c=self.c + weight)

    @override
    def diagonal(self) -> Tensor:
        u2 = self.u**2
        c, p, q, r = (w.unsqueeze(1) for w in (self.c, self.p, self.q, self.r))
        return c * (1 - u2) + p * self.t**2 + 2 * q * self.u * self.t + r * u2

    @override
    def matmul(self, v: Tensor) -> Tensor:
        if v.ndim == 2:
            return self.matmul(v.unsqueeze(2)).squeeze(2)
        c, p, q, r = (w.view(-1, 1, 1) for w in (self.c, self.p, self.q, self.r))
        u, t = self.u.unsqueeze(2), self.t.unsqueeze(2)
        along_u, along_t = u.mT @ v, t.mT @ v
        return c * v + u * ((r - c) * along_u + q * along_t) + t * (p * along_t + q * along_u)

    def total(self) -> Tensor:
        """See :meth:`Blocks.total`; forms no matrix of a point."""
        c, p, q, r = (w.unsqueeze(1) for w in (self.c, self.p, self.q, self.r))
        mixed = self.u.T @ (q * self.t)
        eye = torch.eye(self.u.shape[1], dtype=self.u.dtype, device=self.u.device)
        return self.c.sum() * eye + self.u.T @ ((r - c) * self.u) + self.t.T @ (p * self.t) + mixed + mixed.T

    @override
    def eigenvalue_bounds(self) -> tuple[Tensor, Tensor]:
        inside = self.c + self.p
        mean, half = (inside + self.r) / 2, torch.hypot((inside - self.r) / 2, self.q)
        values = [mean - half, mean + half]
        moves = (self.t != 0).any(1)
        # Without a tangent the plane of u and t shrinks to the line along u.
        low = torch.where(moves, values[0], self.r)
        high = torch.where(moves, values[1], self.r)
        others = self.u.shape[1] - 1 - moves.long()
        low = torch.where(others > 0, torch.minimum(low, self.c), low)
        return low, torch.where(others > 0, torch.maximum(high, self.c), high)

    def project_psd(self) -> NodeBlocks:
        """See :meth:`Blocks.project_psd`; solves one 2 x 2 eigenproblem per point."""
        c = self.c.clamp(min=0)
        value, along_u, along_t = self._plane_eigenpair()
        moves = (self.t != 0).any(1)
        p = torch.where(moves, value * along_t**2 - c, 0.0)
        q = torch.where(moves, value * along_u * along_t, 0.0)
        r = torch.where(moves, value * along_u**2, self.r.clamp(min=0))
        return NodeBlocks(self.u, self.t, c, p, q, r)

    @override
    def factor(self) -> Tensor:
        self.require_psd()
        c = self.c.clamp(min=0).sqrt().view(-1, 1, 1)
        u, t = self.u.unsqueeze(2), self.t.unsqueeze(2)
        eye = torch.eye(self.u.shape[1], dtype=u.dtype, device=u.device)
        moves = (self.t != 0).any(1)
        value, along_u, along_t = self._plane_eigenpair()
        value = torch.where(moves, value, self.r.clamp(min=0)).sqrt().view(-1, 1, 1)
        along_u = torch.where(moves, along_u, 1.0).view(-1, 1, 1)
        axis = along_u * u + along_t.view(-1, 1, 1) * t
        return c * (eye - u @ u.mT - t @ t.mT) + value * axis @ axis.mT

    def signed_factor(self) -> SignedFactor:
        """See :meth:`Blocks.signed_factor`.

        In an orthonormal basis that starts with ``u`` and ``t``, each point has one 2 x 2 eigenproblem; columns that
        are zero for all points (the radial one of ``euclidean``) are left out.
        """
        n, dim = self.u.shape
        if dim == 1:
            values, vectors = self.r.unsqueeze(1), self.u.unsqueeze(2)
        else:
            u = self.u.unsqueeze(2)
            around = _reflection(self.u)
            rotated = (around @ self.t.unsqueeze(2)).squeeze(2)[:, 1:]
            complement = around[:, :, 1:] @ _reflection(rotated)
            moves = (self.t != 0).any(1, keepdim=True)
            t = torch.where(moves, self.t, complement[:, :, 0]).unsqueeze(2)
            plane = torch.stack([self.r, self.q, self.q, self.c + self.p], dim=1).view(n, 2, 2)
            inside, turn = torch.linalg.eigh(plane)
            # Largest absolute value first, so that the zeros of all points share a column.
            order = inside.abs().argsort(dim=1, descending=True)
            inside, turn = inside.gather(1, order), turn.gather(2, order.unsqueeze(1).expand(n, 2, 2))
            vectors = torch.cat([torch.cat([u, t], dim=2) @ turn, complement[:, :, 1:]], dim=2)
            values = torch.cat([inside, self.c.unsqueeze(1).expand(n, dim - 2)], dim=1)
        # If all columns are zero, one stays: convolutions accept no empty batches.
        keep = (values != 0).any(0)
        keep[0] |= ~keep.any()
        values, vectors = values[:, keep], vectors[:, :, keep]
        columns = (vectors * values.abs().sqrt().unsqueeze(1)).permute(2, 0, 1)
        return SignedFactor(columns.contiguous(), values.sign().T.contiguous())

    def _plane_eigenpair(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the larger eigenvalue (clamped at zero) and its unit eigenvector on span(u, t).

        For ``arccos`` the smaller eigenvalue is never positive: the determinant is ``-q^2`` before the projection and 0
        after.
        """
        # Blocks are proportional to 1 / n^2, so their squares would overflow or vanish.
        size = torch.stack([self.c + self.p, self.r, self.q]).abs().amax(0)
        size = torch.where(size > 0, size, torch.ones_like(size))
        inside, r, q = (self.c + self.p) / size, self.r / size, self.q / size
        gap = inside - r
        root = torch.hypot(gap, 2 * q)
        # This is (inside - r + root) / 2, without cancellation where inside < r.
        rise = torch.where(gap >= 0, (gap + root) / 2, 2 * q**2 / torch.where(gap < 0, root - gap, 1.0))
        length = torch.hypot(rise, q)
        safe = torch.where(length > 0, length, torch.ones_like(length))
        along_t = torch.where(length > 0, rise / safe, 0.0)
        along_u = torch.where(length > 0, q / safe, 1.0)
        return (r + rise).clamp(min=0) * size, along_u, along_t


def _reflection(v: Tensor) -> Tensor:
    """Return Householder reflections (N, D, D), first column parallel to ``v`` (N, D), unit vectors or zeros."""
    w = v.clone()
    w[:, 0] += torch.where(v[:, 0] < 0, -1.0, 1.0).to(v.dtype)
    w = w / w.norm(dim=1, keepdim=True)
    eye = torch.eye(v.shape[1], dtype=v.dtype, device=v.device)
    return eye - 2 * w.unsqueeze(2) * w.unsqueeze(1)
