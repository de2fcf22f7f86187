"""The diagonal blocks ``H_ii`` of the output Hessian, as everything downstream sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.hessian.signed import SignedFactor

__all__ = ["Blocks", "UnrepresentableError"]


class UnrepresentableError(InputError):
    """The dtype cannot hold the Hessian: of outputs of these norms, or with these derivatives of the loss."""

    @classmethod
    def at(cls, n: Tensor, held: Tensor) -> UnrepresentableError:
        """The error for some points.

        Args:
            n: Norms of the raw outputs, shape (N,).
            held: Whether the dtype holds the block of a point, shape (N,).
        """
        rows = (~held).nonzero().flatten()[:5].tolist()
        wanted = f"embeddings whose Hessian, which goes with 1 / norm^2, {n.dtype} can hold"
        came = f"norms {[float(f'{float(n[row]):.3g}') for row in rows]} in rows {rows}"
        hint = "Use float64, or rescale the outputs: their directions, the embeddings, stay the same."
        return cls(expected("raw outputs", wanted, came, hint))


class Blocks(ABC):
    """N symmetric (D, D) matrices, one a point.

    Attributes:
        u: Unit embeddings, shape (N, D).
    """

    u: Tensor

    def __len__(self) -> int:
        return self.u.shape[0]

    @abstractmethod
    def __getitem__(self, rows: slice | Tensor) -> Blocks:
        """Blocks of some of the points."""

    @abstractmethod
    def matmul(self, v: Tensor) -> Tensor:
        """``H_ii v_i`` for ``v`` of shape (N, D) or (N, D, K)."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """``diag(H_ii)`` of every point, shape (N, D)."""

    def dense(self) -> Tensor:
        """The blocks as matrices, shape (N, D, D)."""
        n, dim = self.u.shape
        return self.matmul(torch.eye(dim, dtype=self.u.dtype, device=self.u.device).expand(n, dim, dim))

    def total(self) -> Tensor:
        """``sum_i H_ii``, shape (D, D)."""
        return self.dense().sum(0)

    @abstractmethod
    def add_projector(self, weight: Tensor) -> Blocks:
        """Add ``weight_i P_i`` to every block; ``weight`` has shape (N,)."""

    @abstractmethod
    def eigenvalue_bounds(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest eigenvalue of every block, each (N,); a zero along ``u`` counts too."""

    def is_psd(self) -> bool:
        """Whether every block is positive semidefinite, up to the rounding error of its largest eigenvalue."""
        low, high = self.eigenvalue_bounds()
        if not low.numel():
            return True
        scale = torch.maximum(high.abs(), low.abs()).max()
        return bool((low >= -16 * torch.finfo(low.dtype).eps * torch.maximum(scale, self.terms())).all())

    def terms(self) -> Tensor:
        """A bound of the terms that a block is the sum of, shape (N,) or one number, where they may cancel in it."""
        return self.u.new_zeros(())

    def require_psd(self) -> None:
        """Refuse blocks without a real square root.

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

    @abstractmethod
    def project_psd(self) -> Blocks:
        """Nearest positive semidefinite blocks in Frobenius norm: every negative eigenvalue is set to zero."""

    @abstractmethod
    def factor(self) -> Tensor:
        """The symmetric square root ``S_i`` with ``S_i S_i^T = H_ii``, shape (N, D, D).

        Raises:
            UnsupportedError: A block has a negative eigenvalue.
        """

    @abstractmethod
    def signed_factor(self) -> SignedFactor:
        """Eigenvectors of every block times the root of the absolute eigenvalue.

        Returns:
            Columns (C, N, D) with C <= D, signs (C, N).
        """
