"""Signed factors: the square root of a symmetric matrix that may have negative eigenvalues."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["SignedFactor"]


@dataclass(frozen=True)
class SignedFactor:
    """Columns ``v_c`` with signs, ``H = sum_c sign_c v_c v_c^T``.

    Args:
        columns: Shape (C, N, ...): C columns of every point, or C columns of the whole batch.
        signs: Shape (C, N) when every point has columns of its own, (C,) when a column runs over the whole batch.
    """

    columns: Tensor
    signs: Tensor

    @property
    def sums_batch(self) -> bool:
        """Whether a column has to be summed over the points before it is squared."""
        return self.signs.ndim == 1
