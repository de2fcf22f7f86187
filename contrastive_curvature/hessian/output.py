"""The core object: the Hessian of a loss with respect to the raw network outputs, by blocks of points.

With ``u_i = z_i / n_i``, the pair weights ``y_ij`` and the second derivatives ``c_ij`` of a loss of the cosines
(:mod:`contrastive_curvature.hessian.derivatives`), for N outputs of D numbers each:

- off-diagonal blocks, both distances: see :mod:`contrastive_curvature.hessian.cross`;
- diagonal blocks: see :mod:`contrastive_curvature.hessian.node_blocks`.

The Hessian does not know the network: a pullback multiplies it with the Jacobian of the RAW network, ``J^T H J``. This
module applies ``pd_fix`` to the blocks; losses read ``pd_fix`` only to omit the terms that the fix drops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.hessian.blocks import Blocks, SignedFactor
from contrastive_curvature.hessian.cross import CrossBlocks
from contrastive_curvature.hessian.derivatives import CosineDerivatives, NodeSums
from contrastive_curvature.hessian.moments import CurvedBlocks
from contrastive_curvature.hessian.node_blocks import NodeBlocks
from contrastive_curvature.hessian.sphere import normalize, project_tangent
from contrastive_curvature.options import Distance, PDFix

DENSE_LIMIT = 2**13
"""Rows of the largest output Hessian that is ever formed."""


def make_blocks(u: Tensor, n: Tensor, sums: NodeSums, distance: Distance, pd_fix: PDFix) -> Blocks:
    """Make the diagonal blocks of N points from directions (N, D) and norms (N,), and apply the fix.

    ``sums`` already contains the fix ``positive``.
    """
    blocks: Blocks = NodeBlocks.from_sums(u, n, sums.degree, sums.neighbors, distance)
    if pd_fix is PDFix.PSD_PARTS:
        blocks = blocks.project_psd()
    if sums.moments is not None:
        blocks = CurvedBlocks(blocks, n, sums.moments)
    return blocks.project_psd() if pd_fix is PDFix.PSD else blocks


class OutputHessian:
    """Hessian (N D, N D) of a loss at raw outputs, as a linear map that is never formed.

    Args:
        z: Raw outputs, shape (N, D), checked.
        derivatives: Derivatives of the loss in the cosines of the same points.
        distance: The split of the generalised Gauss-Newton.
        pd_fix: The fix for positive definiteness.

    Attributes:
        z: Raw outputs.
        u: Unit embeddings, shape (N, D).
        n: Norms of the outputs, shape (N,).
        derivatives: See above.
        distance: See above.
        pd_fix: See above.
        blocks: The diagonal blocks.
        coupled: Whether the cross blocks are kept (``positive`` and ``full``).
    """

    def __init__(self, z: Tensor, derivatives: CosineDerivatives, distance: Distance, pd_fix: PDFix) -> None:
        self.z = z
        self.u, self.n = normalize(z)
        self.derivatives = derivatives
        self.distance, self.pd_fix = distance, pd_fix
        self.coupled = pd_fix.coupled and derivatives.couples
        sums = derivatives.node_sums()
        self.blocks = make_blocks(self.u, self.n, sums, distance, pd_fix)
        self._totals = sums.totals(self.u)

    def __len__(self) -> int:
        return self.z.shape[0]

    def loss_and_cost(self) -> tuple[Tensor, Tensor]:
        """Return the value of the loss at these outputs, without a graph, and its non-negative version."""
        return self.derivatives.loss_and_cost(self._totals)

    def cross(self, rows: slice, columns: slice) -> CrossBlocks:
        """Return the blocks ``H_ij`` between points i and j, zero where i = j; for coupled fixes only."""
        start, stop, _ = rows.indices(len(self))
        first, second = self.derivatives.rows(start, stop, columns)
        roots = self.derivatives.roots(rows, columns)
        parts = (self.u[rows], self.n[rows], self.u[columns], self.n[columns])
        return CrossBlocks(*parts, first, second, symmetric=rows == columns, roots=roots)

    @property
    def shape(self) -> tuple[int, int]:
        """Return ``(N D, N D)``."""
        return self.z.numel(), self.z.numel()

    def matvec(self, v: Tensor) -> Tensor:
        """Return ``H v``.

        Args:
            v: Shape (N, D), or (N, D, K) for K vectors at once.

        Returns:
            The product, of the shape of ``v``.

        Raises:
            InputTypeError: ``v`` is not a tensor of the outputs' dtype.
            InputError: ``v`` has another N or D, or is not finite.
        """
        if not isinstance(v, Tensor) or v.dtype != self.z.dtype or v.layout != torch.strided:
            got = f"{v.dtype}, {v.layout}" if isinstance(v, Tensor) else f"a {type(v).__name__}"
            raise InputTypeError("v", f"a dense tensor of dtype {self.z.dtype}", got)
        if v.ndim not in (2, 3) or v.shape[:2] != self.z.shape:
            wanted = f"shape {tuple(self.z.shape)} or {(*self.z.shape, 'K')}"
            raise InputError("v", wanted, f"shape {tuple(v.shape)}")
        if not bool(v.isfinite().all()):
            raise InputError("v", "finite numbers", "NaN or infinity")
        out = self.blocks.matmul(v)
        if self.coupled:
            inverse = (1 / self.n).view(-1, *[1] * (v.ndim - 1))
            tangent = inverse * project_tangent(self.u, v)
            mixed = self.derivatives.matmul(tangent if v.ndim == 3 else tangent.unsqueeze(2)).reshape(v.shape)
            out = out + inverse * project_tangent(self.u, mixed)
        return out

    def diagonal(self) -> Tensor:
        """Return the diagonal of ``H``, shape (N, D). It contains no cross blocks."""
        return self.blocks.diagonal()

    def point_blocks(self) -> Tensor:
        """Return the diagonal blocks ``H_ii``, shape (N, D, D)."""
        return self.blocks.dense()

    def dense(self) -> Tensor:
        """Return ``H`` as a matrix (N D, N D); for small N D."""
        n, dim = self.z.shape
        out = self.z.new_zeros(n, dim, n, dim)
        if self.coupled:
            everywhere = self.cross(slice(0, n), slice(0, n))
            eye = torch.eye(dim, dtype=self.z.dtype, device=self.z.device)
            left = eye.repeat_interleave(dim, dim=1).expand(n, dim, dim * dim)
            right = eye.repeat(1, dim).expand(n, dim, dim * dim)
            out = everywhere.forms(left, right).view(dim, dim, n, n).permute(2, 0, 3, 1).clone()
        points = torch.arange(n, device=self.z.device)
        out[points, :, points, :] = self.blocks.dense()
        return out.reshape(n * dim, n * dim)

    def is_psd(self) -> bool:
        """Return whether ``H`` is positive semidefinite, up to rounding.

        Returns:
            For block-diagonal fixes, the exact answer from closed-form eigenvalues; for coupled fixes, the answer for
            the dense matrix.

        Raises:
            UnsupportedError: ``H`` is coupled and too large to be formed.
        """
        if not self.coupled:
            return self.blocks.is_psd()
        low, high = self._dense_eigenvalues()[0][[0, -1]].tolist() if self.z.numel() else (0.0, 0.0)
        size = max(abs(high), abs(low), *self.blocks.terms().flatten().tolist())
        return bool(low >= -16 * self.z.numel() * torch.finfo(self.z.dtype).eps * size)

    def factor(self) -> Tensor:
        """Return a factor ``S`` of a positive semidefinite Hessian.

        Returns:
            Block-diagonal fixes: shape (N, D, D), ``H_ii = S_i S_i^T``. Coupled fixes: shape (N, D, C) with C the rank,
            ``H_ij = S_i S_j^T``.

        Raises:
            UnsupportedError: ``H`` has a negative eigenvalue, or is coupled and too large to be formed.
        """
        if not self.coupled:
            return self.blocks.factor()
        if not self.is_psd():
            raise UnsupportedError(
                f"factor: with pd_fix={str(self.pd_fix)!r} and distance={str(self.distance)!r} the "
                "output Hessian of these pairs is indefinite, so it has no real square root. Use pd_fix='psd' "
                "(always positive semidefinite), or pd_fix='positive' with distance='euclidean'."
            )
        values, vectors = self._dense_eigenvalues()
        keep = values > values.numel() * torch.finfo(values.dtype).eps * values.abs().max()
        return (vectors[:, keep] * values[keep].sqrt()).view(*self.z.shape, -1)

    def signed_factor(self) -> SignedFactor:
        """Return a signed factor of the whole Hessian, which may be indefinite.

        Returns:
            The factor of the blocks; for coupled points C <= N D columns (C, N, D) over the batch and signs (C,).

        Raises:
            UnsupportedError: ``H`` is coupled and too large for an eigendecomposition.
        """
        if not self.coupled:
            return self.blocks.signed_factor()
        values, vectors = self._dense_eigenvalues()
        size = values.abs().max() if values.numel() else values.sum()
        keep = values.abs() > torch.finfo(values.dtype).eps * size
        keep[-1:] = True
        columns = (vectors[:, keep] * values[keep].abs().sqrt()).T.reshape(-1, *self.z.shape)
        return SignedFactor(columns, values[keep].sign())

    def _dense_eigenvalues(self) -> tuple[Tensor, Tensor]:
        if self.z.numel() > DENSE_LIMIT:
            raise UnsupportedError(
                f"The coupled output Hessian of {self.z.shape[0]} points in {self.z.shape[1]} dimensions is too large "
                "for an eigendecomposition. Use pd_fix='psd' or 'fixed', whose blocks have closed forms, or fewer "
                "points."
            )
        values, vectors = torch.linalg.eigh(self.dense())
        return values, vectors
