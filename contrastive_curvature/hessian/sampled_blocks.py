"""Diagonal blocks with a random square root: K columns a point in place of one an output.

A block ``H = V+ V+^T - V- V-^T`` has the sampled columns ``V+ e / sqrt(K)``, K of them with the sign +1, and, if some
block has a negative eigenvalue, K columns ``V- e / sqrt(K)`` with the sign -1, for vectors ``e`` of random signs. The
sum over the columns of ``sign v v^T`` has the mean ``H``; of all noise of unit covariance, random signs have the
smallest fourth moment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.signed import SignedFactor

__all__ = ["SampledBlocks"]


class SampledBlocks(Blocks):
    """Blocks whose signed factor is sampled; everything else is that of the exact ones.

    Args:
        exact: The blocks of N points.
        mc_samples: Number K of samples, of the positive and of the negative part each.
        generator: Source of randomness, on the CPU.
    """

    def __init__(self, exact: Blocks, mc_samples: int, generator: torch.Generator) -> None:
        self.exact, self.mc_samples, self.generator = exact, mc_samples, generator
        self.u = exact.u

    def __getitem__(self, rows: slice | Tensor) -> SampledBlocks:
        return SampledBlocks(self.exact[rows], self.mc_samples, self.generator)

    def matmul(self, v: Tensor) -> Tensor:
        """See :meth:`Blocks.matmul`."""
        return self.exact.matmul(v)

    def diagonal(self) -> Tensor:
        """See :meth:`Blocks.diagonal`."""
        return self.exact.diagonal()

    def add_projector(self, weight: Tensor) -> SampledBlocks:
        """See :meth:`Blocks.add_projector`."""
        return SampledBlocks(self.exact.add_projector(weight), self.mc_samples, self.generator)

    def eigenvalue_bounds(self) -> tuple[Tensor, Tensor]:
        """See :meth:`Blocks.eigenvalue_bounds`."""
        return self.exact.eigenvalue_bounds()

    def project_psd(self) -> SampledBlocks:
        """See :meth:`Blocks.project_psd`."""
        return SampledBlocks(self.exact.project_psd(), self.mc_samples, self.generator)

    def factor(self) -> Tensor:
        """See :meth:`Blocks.factor`."""
        return self.exact.factor()

    def signed_factor(self) -> SignedFactor:
        """The sampled columns.

        Returns:
            Columns (K, N, D), or (2 K, N, D) where some block has a negative eigenvalue; signs of the shape (K, N) or
            (2 K, N), +1 in front and -1 behind.
        """
        exact = self.exact.signed_factor()
        size = exact.columns.square().sum(2)
        # Projected blocks have eigenvalues of the size of rounding errors, which would double the backward passes.
        rounding = 32 * torch.finfo(size.dtype).eps * (size.max() if size.numel() else 0.0)
        columns, signs = [], []
        for sign in (1, -1):
            mine = (exact.signs == sign).to(exact.columns.dtype)
            if sign < 0 and not bool((mine * size > rounding).any()):
                continue
            shape = (self.mc_samples, *exact.signs.shape)
            noise = torch.randint(0, 2, shape, generator=self.generator).to(mine) * 2 - 1
            columns.append(torch.einsum("kcn,cnd->knd", noise * mine, exact.columns) / self.mc_samples**0.5)
            signs.append(torch.full_like(columns[-1][..., 0], sign))
        return SignedFactor(torch.cat(columns), torch.cat(signs))
