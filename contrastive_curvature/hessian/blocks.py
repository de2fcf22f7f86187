"""The diagonal blocks ``H_ii`` of the output Hessian, in closed form.

Every block, before and after its projection on the positive semidefinite cone, has the form

``H_ii = c P + p t t^T + q (u t^T + t u^T) + r u u^T``

with the tangent projector ``P = I - u u^T`` and a unit tangent ``t``, so products, diagonals, eigenvalues and square
roots cost O(D) a point instead of O(D^2) or O(D^3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.hessian.sphere import project_tangent
from contrastive_curvature.options import Distance

__all__ = ["NodeBlocks", "UnrepresentableError"]


class UnrepresentableError(InputError):
    """The dtype cannot hold a Hessian of outputs of these norms."""


@dataclass(frozen=True)
class NodeBlocks:
    """N symmetric (D, D) blocks.

    Args:
        u: Unit embeddings, shape (N, D).
        t: Unit tangents (zero where the loss pulls nowhere), shape (N, D).
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
        """Build the blocks from the degrees and pulls of the pair weights.

        Args:
            u: Unit embeddings, shape (N, D).
            n: Norms of the raw outputs, shape (N,).
            d: ``sum_j y_ij``, shape (N,), of the type of ``u`` or wider.
            s: ``sum_j y_ij u_j``, shape (N, D), the same.
            distance: ``euclidean``: ``d P / n^2``. ``arccos``: ``(a P + u t^T + t u^T) / n^2`` with ``a = u . s`` and
                ``t = s - a u`` (paper, appendices F.1 and F.2, summed over the pairs of a point).

        Returns:
            The blocks.

        Raises:
            UnrepresentableError: The norms are so large or small that the dtype cannot hold blocks that go with
                ``1 / n^2``.
        """
        zero = torch.zeros_like(n)
        if distance is Distance.EUCLIDEAN:
            return cls(u, torch.zeros_like(u), d.to(n.dtype) / n / n, zero, zero, zero)._representable(n)
        wide = u.to(s.dtype)
        a = (wide * s).sum(1).to(n.dtype)
        # Projected twice: the first projection leaves a radial residue of the size of the rounding error of s.
        t = project_tangent(u, project_tangent(wide, s).to(u.dtype))
        length = t.norm(dim=1)
        direction = t / torch.where(length > 0, length, torch.ones_like(length)).unsqueeze(1)
        return cls(u, direction, a / n / n, zero, length / n / n, zero)._representable(n)

    def _representable(self, n: Tensor) -> NodeBlocks:
        """These blocks, if they are finite and have all their digits."""
        info = torch.finfo(n.dtype)
        low, high = info.tiny**0.5, info.tiny**-0.5
        size = torch.maximum(self.c.abs(), self.q.abs())
        held = (n >= low) & (n <= high) & ((size == 0) | (size >= info.tiny)) & size.isfinite()
        if not bool(held.all()):
            rows = (~held).nonzero().flatten()[:5].tolist()
            wanted = f"embeddings whose Hessian, which goes with 1 / norm^2, {n.dtype} can hold"
            came = f"norms {[float(f'{float(n[row]):.3g}') for row in rows]} in rows {rows}"
            hint = "Use float64, or rescale the outputs: their directions, the embeddings, stay the same."
            raise UnrepresentableError(expected("raw outputs", wanted, came, hint))
        return self

    def __getitem__(self, rows: slice | Tensor) -> NodeBlocks:
        """Blocks of some of the points."""
        return NodeBlocks(self.u[rows], self.t[rows], self.c[rows], self.p[rows], self.q[rows], self.r[rows])

    def add_projector(self, weight: Tensor) -> NodeBlocks:
        """Add ``weight_i P_i`` to every block; ``weight`` has shape (N,)."""
        return replace(self, c=self.c + weight)

    def diagonal(self) -> Tensor:
        """``diag(H_ii)`` of every point, shape (N, D)."""
        u2 = self.u**2
        c, p, q, r = (w.unsqueeze(1) for w in (self.c, self.p, self.q, self.r))
        return c * (1 - u2) + p * self.t**2 + 2 * q * self.u * self.t + r * u2

    def matmul(self, v: Tensor) -> Tensor:
        """``H_ii v_i`` for ``v`` of shape (N, D) or (N, D, K)."""
        if v.ndim == 2:
            return self.matmul(v.unsqueeze(2)).squeeze(2)
        c, p, q, r = (w.view(-1, 1, 1) for w in (self.c, self.p, self.q, self.r))
        u, t = self.u.unsqueeze(2), self.t.unsqueeze(2)
        along_u, along_t = u.mT @ v, t.mT @ v
        return c * v + u * ((r - c) * along_u + q * along_t) + t * (p * along_t + q * along_u)

    def dense(self) -> Tensor:
        """The blocks as matrices, shape (N, D, D)."""
        n, dim = self.u.shape
        return self.matmul(torch.eye(dim, dtype=self.u.dtype, device=self.u.device).expand(n, dim, dim))

    def eigenvalue_bounds(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest eigenvalue of every block, each (N,); zero along ``u`` counts too."""
        inside = self.c + self.p
        mean, half = (inside + self.r) / 2, torch.hypot((inside - self.r) / 2, self.q)
        values = [mean - half, mean + half]
        moves = (self.t != 0).any(1)
        # Without a tangent the plane of u and t shrinks to the line of u.
        low = torch.where(moves, values[0], self.r)
        high = torch.where(moves, values[1], self.r)
        others = self._complement_dimension()
        low = torch.where(others > 0, torch.minimum(low, self.c), low)
        return low, torch.where(others > 0, torch.maximum(high, self.c), high)

    def is_psd(self) -> bool:
        """Whether every block is positive semidefinite, up to the rounding error of its largest eigenvalue."""
        low, high = self.eigenvalue_bounds()
        if not low.numel():
            return True
        scale = torch.maximum(high.abs(), low.abs()).max()
        return bool((low >= -16 * torch.finfo(low.dtype).eps * scale).all())

    def project_psd(self) -> NodeBlocks:
        """Nearest positive semidefinite blocks in Frobenius norm (the ``psd`` fix), one 2 x 2 eigenproblem a point.

        Returns:
            Blocks with every negative eigenvalue set to zero.
        """
        c = self.c.clamp(min=0)
        value, along_u, along_t = self._plane_eigenpair()
        moves = (self.t != 0).any(1)
        p = torch.where(moves, value * along_t**2 - c, 0.0)
        q = torch.where(moves, value * along_u * along_t, 0.0)
        r = torch.where(moves, value * along_u**2, self.r.clamp(min=0))
        return NodeBlocks(self.u, self.t, c, p, q, r)

    def factor(self) -> Tensor:
        """Symmetric square root ``S_i`` with ``S_i S_i^T = H_ii``, shape (N, D, D).

        Raises:
            UnsupportedError: A block has a negative eigenvalue.
        """
        if not self.is_psd():
            low = self.eigenvalue_bounds()[0]
            msg = (
                f"factor: the output Hessian is not positive semidefinite (point {int(low.argmin())} has the "
                f"eigenvalue {float(low.min()):.3g}), so it has no real square root. Use pd_fix='psd', which projects "
                "every block."
            )
            raise UnsupportedError(msg)
        c = self.c.clamp(min=0).sqrt().view(-1, 1, 1)
        u, t = self.u.unsqueeze(2), self.t.unsqueeze(2)
        eye = torch.eye(self.u.shape[1], dtype=u.dtype, device=u.device)
        moves = (self.t != 0).any(1)
        value, along_u, along_t = self._plane_eigenpair()
        value = torch.where(moves, value, self.r.clamp(min=0)).sqrt().view(-1, 1, 1)
        along_u = torch.where(moves, along_u, 1.0).view(-1, 1, 1)
        axis = along_u * u + along_t.view(-1, 1, 1) * t
        return c * (eye - u @ u.mT - t @ t.mT) + value * axis @ axis.mT

    def _complement_dimension(self) -> Tensor:
        """Dimension of the tangent space without ``t``, shape (N,)."""
        return self.u.shape[1] - 1 - (self.t != 0).any(1).long()

    def _plane_eigenpair(self) -> tuple[Tensor, Tensor, Tensor]:
        """Larger eigenvalue (clamped at zero) and unit eigenvector of the block on span(u, t).

        The smaller one is never positive for ``arccos``: before the projection the determinant is ``-q^2``, after it 0.
        """
        # Blocks go with 1 / n^2, so that their squares would overflow or vanish.
        size = torch.stack([self.c + self.p, self.r, self.q]).abs().amax(0)
        size = torch.where(size > 0, size, torch.ones_like(size))
        inside, r, q = (self.c + self.p) / size, self.r / size, self.q / size
        gap = inside - r
        root = torch.hypot(gap, 2 * q)
        # (inside - r + root) / 2 without cancellation where inside < r.
        rise = torch.where(gap >= 0, (gap + root) / 2, 2 * q**2 / torch.where(gap < 0, root - gap, 1.0))
        length = torch.hypot(rise, q)
        safe = torch.where(length > 0, length, torch.ones_like(length))
        along_t = torch.where(length > 0, rise / safe, 0.0)
        along_u = torch.where(length > 0, q / safe, 1.0)
        return (r + rise).clamp(min=0) * size, along_u, along_t
