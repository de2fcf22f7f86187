"""The diagonal blocks ``H_ii`` of the output Hessian: their common interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature.errors import InputError, UnsupportedError


class UnrepresentableError(InputError):
    """The dtype cannot hold the Hessian, because of the outputs' norms or the loss's derivatives."""

    @classmethod
    def at(cls, n: Tensor, held: Tensor, outputs: str = "raw outputs") -> UnrepresentableError:
        """Make the error for ``outputs`` with norms ``n`` (N,); ``held`` (N,) marks the blocks that it can hold."""
        rows = (~held).nonzero().flatten()[:5].tolist()
        wanted = f"embeddings whose Hessian, which goes with 1 / norm^2, {n.dtype} can hold"
        got = f"norms {[float(f'{float(n[row]):.3g}') for row in rows]} in rows {rows}"
        hint = "Use float64, or rescale the outputs: their directions, the embeddings, stay the same."
        return cls(outputs, wanted, got, hint)


def holds_curvature(n: Tensor) -> Tensor:
    """Return whether the dtype of norms (N,) holds ``1 / n^2``, boolean (N,)."""
    low = torch.finfo(n.dtype).tiny ** 0.5
    return (n >= low) & (n <= 1 / low)


@dataclass(frozen=True)
class SignedFactor:
    """Columns ``v_c`` with signs, ``H = sum_c sign_c v_c v_c^T``: a square root that allows negative eigenvalues.

    Args:
        columns: Shape (C, N, ...): C columns of every point, or C columns of the whole batch.
        signs: Shape (C, N) when every point has columns of its own, (C,) when a column runs over the whole batch.
    """

    columns: Tensor
    signs: Tensor

    @property
    def sums_batch(self) -> bool:
        """Return whether a column is summed over the points before it is squared."""
        return self.signs.ndim == 1

    def scaled(self, by: Tensor) -> SignedFactor:
        """Return the factor of ``by H``, for a scalar of any sign."""
        return SignedFactor(self.columns * by.abs().sqrt(), self.signs * by.sign())


class Blocks(ABC):
    """N symmetric (D, D) matrices, one per point.

    Attributes:
        u: Unit embeddings, shape (N, D).
    """

    u: Tensor

    def __len__(self) -> int:
        return self.u.shape[0]

    @abstractmethod
    def __getitem__(self, rows: slice) -> Blocks:
        """Return the blocks of a slice of the points, with step one."""

    @abstractmethod
    def matmul(self, v: Tensor) -> Tensor:
        """Return ``H_ii v_i`` for ``v`` of shape (N, D) or (N, D, K)."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return ``diag(H_ii)`` of every point, shape (N, D)."""

    def dense(self) -> Tensor:
        """Return the blocks as matrices, shape (N, D, D)."""
        n, dim = self.u.shape
        return self.matmul(torch.eye(dim, dtype=self.u.dtype, device=self.u.device).expand(n, dim, dim))

    def total(self) -> Tensor:
        """Return ``sum_i H_ii``, shape (D, D)."""
        return self.dense().sum(0)

    def add_projector(self, weight: Tensor) -> Blocks:
        """Add ``weight_i P_i`` to every block; ``weight`` has shape (N,)."""
        return self.formed().add_projector(weight)

    def eigenvalue_bounds(self) -> tuple[Tensor, Tensor]:
        """Return every block's smallest and largest eigenvalue, each (N,), including a zero along ``u``."""
        return self.formed().eigenvalue_bounds()

    def is_psd(self) -> bool:
        """Return whether every block is positive semidefinite, up to the rounding error of its largest eigenvalue."""
        low, high = self.eigenvalue_bounds()
        if not low.numel():
            return True
        scale = torch.maximum(high.abs(), low.abs()).max()
        return bool((low >= -16 * torch.finfo(low.dtype).eps * torch.maximum(scale, self.terms())).all())

    def terms(self) -> Tensor:
        """Bound the terms that may cancel in the sum of a block, shape (N,) or one number."""
        return self.u.new_zeros(())

    def require_psd(self) -> None:
        """Raise ``UnsupportedError`` if a block has a negative eigenvalue, so no real square root."""
        if not self.is_psd():
            low = self.eigenvalue_bounds()[0]
            raise UnsupportedError(
                f"factor: the output Hessian is not positive semidefinite (point {int(low.argmin())} has the "
                f"eigenvalue {float(low.min()):.3g}), so it has no real square root. Use pd_fix='psd', which projects "
                "every block."
            )

    def project_psd(self) -> Blocks:
        """Return the nearest positive semidefinite blocks: every negative eigenvalue is set to zero."""
        return self.formed().project_psd()

    def factor(self) -> Tensor:
        """Return the symmetric square root ``S_i`` with ``S_i S_i^T = H_ii``, shape (N, D, D), if it exists."""
        return self.formed().factor()

    def signed_factor(self) -> SignedFactor:
        """Return each block's eigenvectors times the root of the absolute eigenvalue, C <= D columns."""
        return self.formed().signed_factor()

    def formed(self) -> DenseBlocks:
        """Return the same blocks, stored as matrices."""
        return DenseBlocks(self.u, self.dense())


@dataclass(frozen=True)
class DenseBlocks(Blocks):
    """Blocks stored as matrices, for blocks without a shorter description.

    Args:
        u: Unit embeddings, shape (N, D).
        matrices: Shape (N, D, D), symmetric.
    """

    u: Tensor
    matrices: Tensor

    def __getitem__(self, rows: slice) -> DenseBlocks:
        return DenseBlocks(self.u[rows], self.matrices[rows])

    @override
    def matmul(self, v: Tensor) -> Tensor:
        return (self.matrices @ v.unsqueeze(2)).squeeze(2) if v.ndim == 2 else self.matrices @ v

    @override
    def diagonal(self) -> Tensor:
        return self.matrices.diagonal(dim1=1, dim2=2)

    @override
    def dense(self) -> Tensor:
        return self.matrices

    @override
    def add_projector(self, weight: Tensor) -> DenseBlocks:
        eye = torch.eye(self.u.shape[1], dtype=self.u.dtype, device=self.u.device)
        projector = eye - self.u.unsqueeze(2) * self.u.unsqueeze(1)
        return DenseBlocks(self.u, self.matrices + weight.view(-1, 1, 1) * projector)

    @override
    def eigenvalue_bounds(self) -> tuple[Tensor, Tensor]:
        values = torch.linalg.eigvalsh(self.matrices)
        return values[:, 0], values[:, -1]

    @override
    def project_psd(self) -> DenseBlocks:
        values, vectors = torch.linalg.eigh(self.matrices)
        return DenseBlocks(self.u, (vectors * values.clamp(min=0).unsqueeze(1)) @ vectors.mT)

    @override
    def factor(self) -> Tensor:
        self.require_psd()
        return self.root()

    def root(self) -> Tensor:
        """Return the symmetric square root of the positive part of every block, shape (N, D, D)."""
        values, vectors = torch.linalg.eigh(self.matrices)
        return (vectors * values.clamp(min=0).sqrt().unsqueeze(1)) @ vectors.mT

    @override
    def signed_factor(self) -> SignedFactor:
        values, vectors = torch.linalg.eigh(self.matrices)
        columns = (vectors * values.abs().sqrt().unsqueeze(1)).permute(2, 0, 1)
        return SignedFactor(columns.contiguous(), values.sign().T.contiguous())


class SampledBlocks(Blocks):
    """Blocks with a random square root: K columns per point, not one column per output.

    A block ``H = V+ V+^T - V- V-^T`` has K sampled columns ``V+ e / sqrt(K)`` with the sign +1, for vectors ``e`` of
    random signs. If any block has a negative eigenvalue, there are also K columns ``V- e / sqrt(K)`` with the sign -1.
    The sum of ``sign v v^T`` over the columns has the mean ``H``. Random signs have the smallest fourth moment of all
    noise with unit covariance.

    Args:
        exact: The blocks of N points.
        mc_samples: Number K of samples for the positive part, and K for the negative part.
        generator: Source of randomness, on the CPU.
    """

    def __init__(self, exact: Blocks, mc_samples: int, generator: torch.Generator) -> None:
        self.exact, self.mc_samples, self.generator = exact, mc_samples, generator
        self.u = exact.u

    def __getitem__(self, rows: slice) -> SampledBlocks:
        return SampledBlocks(self.exact[rows], self.mc_samples, self.generator)

    @override
    def matmul(self, v: Tensor) -> Tensor:
        return self.exact.matmul(v)

    @override
    def diagonal(self) -> Tensor:
        return self.exact.diagonal()

    def signed_factor(self) -> SignedFactor:
        """Sample columns (K, N, D), or (2 K, N, D) if a block has a negative eigenvalue, signs -1 last."""
        exact = self.exact.signed_factor()
        size = exact.columns.square().sum(2)
        # Projected blocks have negative eigenvalues by rounding, which would double the number of backward passes.
        rounding = 32 * torch.finfo(size.dtype).eps * (size.max() if size.numel() else 0.0)
        columns, signs = [], []
        for sign in (1, -1):
            mine = (exact.signs == sign).to(exact.columns.dtype)
            if sign < 0 and not bool((mine * size > rounding).any()):
                continue
            shape = (self.mc_samples, *exact.signs.shape)
            noise = torch.randint(0, 2, shape, generator=self.generator, device="cpu").to(mine) * 2 - 1
            columns.append(torch.einsum("kcn,cnd->knd", noise * mine, exact.columns) / self.mc_samples**0.5)
            signs.append(torch.full_like(columns[-1][..., 0], sign))
        return SignedFactor(torch.cat(columns), torch.cat(signs))
