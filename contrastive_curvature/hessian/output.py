"""The core object: the Hessian of the pair loss with respect to the raw network outputs, in node form.

With ``u_i = z_i / n_i`` and the symmetric pair weights ``Y``, for N outputs of D numbers each:

- off-diagonal blocks, both distances: ``H_ij = -y_ij P_i P_j / (n_i n_j)``;
- diagonal blocks: see :mod:`contrastive_curvature.hessian.blocks`.

The network is none of its business. A backend pulls it back with the Jacobian of the RAW network: ``J^T H J``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.hessian.blocks import NodeBlocks
from contrastive_curvature.hessian.sphere import check_outputs, normalize, project_tangent
from contrastive_curvature.losses.effort import FASTER, announce_pairs
from contrastive_curvature.losses.weights import PairWeights
from contrastive_curvature.options import CurvatureOptions, Distance, Normalization, PDFix
from contrastive_curvature.pairs import Pairs, make_relation
from contrastive_curvature.progress import Progress

__all__ = ["DENSE_LIMIT", "OutputHessian", "output_hessian"]

DENSE_LIMIT = 2**13
"""Rows of the largest output Hessian that is ever formed."""


class OutputHessian:
    """Hessian (N D, N D) of the pair loss at raw outputs, as a linear map that is never formed.

    Args:
        z: Raw outputs, shape (N, D), checked.
        weights: Pair weights of the same points.
        options: The options that the weights were made with.

    Attributes:
        z: Raw outputs.
        u: Unit embeddings, shape (N, D).
        n: Norms of the outputs, shape (N,).
        weights: The pair weights ``Y``.
        options: Distance, fix and pair options.
        blocks: The diagonal blocks.
        coupled: Whether the cross blocks are kept (``positive`` and ``full``).
    """

    def __init__(self, z: Tensor, weights: PairWeights, options: CurvatureOptions) -> None:
        self.z = z
        self.u, self.n = normalize(z)
        self.weights = weights
        self.options = options
        self.coupled = options.pd_fix.coupled
        blocks = NodeBlocks.from_sums(self.u, self.n, *weights.node_sums(), options.distance)
        self.blocks = blocks.project_psd() if options.pd_fix is PDFix.PSD else blocks

    @classmethod
    def from_pairs(
        cls, z: Tensor, options: CurvatureOptions, labels: Tensor | None = None, pairs: Pairs | None = None
    ) -> OutputHessian:
        """Build it from what the user has; arguments and errors as in :func:`output_hessian`."""
        z = check_outputs(z)
        relation = make_relation(z.shape[0], z.device, labels, pairs)
        u = normalize(z)[0]
        announce_pairs(relation, u, options, Progress(None, FASTER))
        return cls(z, PairWeights(relation, u, options), options)

    @property
    def shape(self) -> tuple[int, int]:
        """``(N D, N D)``."""
        return self.z.numel(), self.z.numel()

    def matvec(self, v: Tensor) -> Tensor:
        """``H v``.

        Args:
            v: Shape (N, D), or (N, D, K) for K vectors at once.

        Returns:
            The product, of the shape of ``v``.

        Raises:
            InputTypeError: ``v`` is no tensor of the outputs' type.
            InputError: ``v`` has another N or D, or is not finite.
        """
        if not isinstance(v, Tensor) or v.dtype != self.z.dtype or v.layout != torch.strided:
            came = f"{v.dtype}, {v.layout}" if isinstance(v, Tensor) else f"a {type(v).__name__}"
            raise InputTypeError(expected("v", f"a dense tensor of dtype {self.z.dtype}", came))
        if v.ndim not in (2, 3) or v.shape[:2] != self.z.shape:
            wanted = f"shape {tuple(self.z.shape)} or {(*self.z.shape, 'K')}"
            raise InputError(expected("v", wanted, f"shape {tuple(v.shape)}"))
        if not bool(v.isfinite().all()):
            raise InputError(expected("v", "finite numbers", "NaN or infinity"))
        out = self.blocks.matmul(v)
        if self.coupled:
            inverse = (1 / self.n).view(-1, *[1] * (v.ndim - 1))
            pulled = (inverse * project_tangent(self.u, v)).reshape(v.shape[0], -1)
            pushed = self.weights.matmul(pulled).view_as(v)
            out = out - inverse * project_tangent(self.u, pushed)
        return out

    def diagonal(self) -> Tensor:
        """Diagonal of ``H``, shape (N, D). Cross blocks have no part in it."""
        return self.blocks.diagonal()

    def point_blocks(self) -> Tensor:
        """Diagonal blocks ``H_ii``, shape (N, D, D)."""
        return self.blocks.dense()

    def dense(self) -> Tensor:
        """``H`` as a matrix (N D, N D); for small N D."""
        n, dim = self.z.shape
        out = self.z.new_zeros(n, dim, n, dim)
        if self.coupled:
            eye = torch.eye(dim, dtype=self.u.dtype, device=self.u.device)
            projector = (eye - self.u.unsqueeze(2) * self.u.unsqueeze(1)) / self.n.view(-1, 1, 1)
            out = -torch.einsum("ij,iab,jbc->iajc", self.weights.dense(), projector, projector)
        points = torch.arange(n, device=self.z.device)
        out[points, :, points, :] = self.blocks.dense()
        return out.reshape(n * dim, n * dim)

    def is_psd(self) -> bool:
        """Whether ``H`` is positive semidefinite, up to rounding.

        Returns:
            For block-diagonal fixes the exact answer from closed-form eigenvalues; for coupled ones that of the dense
            matrix.

        Raises:
            UnsupportedError: Coupled and too large to be formed.
        """
        if not self.coupled:
            return self.blocks.is_psd()
        low, high = self._dense_eigenvalues()[0][[0, -1]].tolist() if self.z.numel() else (0.0, 0.0)
        return bool(low >= -16 * self.z.numel() * torch.finfo(self.z.dtype).eps * max(abs(high), abs(low)))

    def factor(self) -> Tensor:
        """A factor ``S`` of the Hessian, where it is positive semidefinite.

        Returns:
            Block-diagonal fixes: shape (N, D, D), ``H_ii = S_i S_i^T``. Coupled fixes: shape (N, D, C) with C the rank,
            ``H_ij = S_i S_j^T``.

        Raises:
            UnsupportedError: ``H`` has a negative eigenvalue, or is coupled and too large to be formed.
        """
        if not self.coupled:
            return self.blocks.factor()
        if not self.is_psd():
            msg = (
                f"factor: with pd_fix={str(self.options.pd_fix)!r} and distance={str(self.options.distance)!r} the "
                "output Hessian of these pairs is indefinite, so it has no real square root. Use pd_fix='psd' "
                "(always positive semidefinite), or pd_fix='positive' with distance='euclidean'."
            )
            raise UnsupportedError(msg)
        values, vectors = self._dense_eigenvalues()
        keep = values > values.numel() * torch.finfo(values.dtype).eps * values.abs().max()
        return (vectors[:, keep] * values[keep].sqrt()).view(*self.z.shape, -1)

    def _dense_eigenvalues(self) -> tuple[Tensor, Tensor]:
        if self.z.numel() > DENSE_LIMIT:
            msg = (
                f"The coupled output Hessian of {self.z.shape[0]} points in {self.z.shape[1]} dimensions is too large "
                "for an eigendecomposition. Use pd_fix='psd' or 'fixed', whose blocks have closed forms, or fewer "
                "points."
            )
            raise UnsupportedError(msg)
        values, vectors = torch.linalg.eigh(self.dense())
        return values, vectors


def output_hessian(
    z: Tensor,
    labels: Tensor | None = None,
    *,
    pairs: Pairs | None = None,
    distance: Distance | str = Distance.ARCCOS,
    pd_fix: PDFix | str = PDFix.FIXED,
    margin: float | None = 0.7,
    negative_weight: float = 0.5,
    normalization: Normalization | str = Normalization.ANCHOR,
) -> OutputHessian:
    """Hessian of the contrastive loss with respect to raw outputs.

    Args:
        z: Raw outputs, before any l2-normalisation, shape (N, D); half precision is lifted to float32.
        labels: Integer class labels, shape (N,).
        pairs: Instead of labels: index tuples, masks, or a callable
            (:func:`contrastive_curvature.pairs.make_relation`).
        distance: See :class:`~contrastive_curvature.options.Distance`.
        pd_fix: See :class:`~contrastive_curvature.options.PDFix`.
        margin: See :class:`~contrastive_curvature.options.CurvatureOptions`.
        negative_weight: The same.
        normalization: The same.

    Returns:
        The Hessian. With ``distance="arccos"`` and ``pd_fix="full"`` it is the exact Hessian of
        :class:`~contrastive_curvature.losses.contrastive.ContrastiveLoss`.

    Raises:
        InputError: Outputs, labels, pairs or an option are malformed, or the norms of the outputs are so large or small
            that the dtype cannot hold the Hessian.
    """
    options = CurvatureOptions(distance, pd_fix, margin, negative_weight, normalization)  # type: ignore[arg-type]
    return OutputHessian.from_pairs(z, options, labels, pairs)
