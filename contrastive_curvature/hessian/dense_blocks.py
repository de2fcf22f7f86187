"""The diagonal blocks ``H_ii`` as matrices, where nothing shorter describes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.signed import SignedFactor

__all__ = ["DenseBlocks"]


@dataclass(frozen=True)
class DenseBlocks(Blocks):
    """N symmetric (D, D) blocks, held as they are.

    Args:
        u: Unit embeddings, shape (N, D).
        matrices: Shape (N, D, D), symmetric.
    """

    u: Tensor
    matrices: Tensor

    def __getitem__(self, rows: slice | Tensor) -> DenseBlocks:
        return DenseBlocks(self.u[rows], self.matrices[rows])

    def matmul(self, v: Tensor) -> Tensor:
        """See :meth:`Blocks.matmul`."""
        return (self.matrices @ v.unsqueeze(2)).squeeze(2) if v.ndim == 2 else self.matrices @ v

    def diagonal(self) -> Tensor:
        """See :meth:`Blocks.diagonal`."""
        return self.matrices.diagonal(dim1=1, dim2=2)

    def dense(self) -> Tensor:
        """See :meth:`Blocks.dense`."""
        return self.matrices

    def add_projector(self, weight: Tensor) -> DenseBlocks:
        """See :meth:`Blocks.add_projector`."""
        eye = torch.eye(self.u.shape[1], dtype=self.u.dtype, device=self.u.device)
        projector = eye - self.u.unsqueeze(2) * self.u.unsqueeze(1)
        return DenseBlocks(self.u, self.matrices + weight.view(-1, 1, 1) * projector)

    def eigenvalue_bounds(self) -> tuple[Tensor, Tensor]:
        """See :meth:`Blocks.eigenvalue_bounds`."""
        values = torch.linalg.eigvalsh(self.matrices)
        return values[:, 0], values[:, -1]

    def project_psd(self) -> DenseBlocks:
        """See :meth:`Blocks.project_psd`."""
        values, vectors = torch.linalg.eigh(self.matrices)
        return DenseBlocks(self.u, (vectors * values.clamp(min=0).unsqueeze(1)) @ vectors.mT)

    def factor(self) -> Tensor:
        """See :meth:`Blocks.factor`; the root is symmetric."""
        self.require_psd()
        return self.root()

    def root(self) -> Tensor:
        """The symmetric square root of the positive part of every block, shape (N, D, D)."""
        values, vectors = torch.linalg.eigh(self.matrices)
        return (vectors * values.clamp(min=0).sqrt().unsqueeze(1)) @ vectors.mT

    def signed_factor(self) -> SignedFactor:
        """See :meth:`Blocks.signed_factor`."""
        values, vectors = torch.linalg.eigh(self.matrices)
        columns = (vectors * values.abs().sqrt().unsqueeze(1)).permute(2, 0, 1)
        return SignedFactor(columns.contiguous(), values.sign().T.contiguous())
