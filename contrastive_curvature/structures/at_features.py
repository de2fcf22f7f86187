"""How the outputs of a last linear layer spread at its features: the part of a posterior that a prediction needs.

It is computed once for a curvature, a prior and a temperature, and :mod:`contrastive_curvature.io.serving` exports it
unchanged. Each kind returns the fields of a spread of :mod:`contrastive_curvature.embedding.spread`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.network.last_layer import diag_last_layer_variance
from contrastive_curvature.network.pullback import full_precision

AtFeatures = Callable[[Tensor], tuple[Any, ...]]
"""From features (B, F) to the parts of a spread."""


@dataclass(frozen=True, eq=False)
class DiagonalAtFeatures:
    """Spread of outputs with independent weights.

    Attributes:
        variance: Variances of ``[W.flatten(), b]``, shape (P,).
        dim: Number D of outputs.
    """

    variance: Tensor
    dim: int

    def __call__(self, phi: Tensor) -> tuple[Tensor]:
        """Return variances (B, D) of independent outputs, at features (B, F)."""
        return (diag_last_layer_variance(phi, self.variance, self.dim),)


@dataclass(frozen=True, eq=False)
class AxesAtFeatures:
    """Spread from Kronecker factors: variances ``along (Q^T phi)^2 + across |phi - Q Q^T phi|^2 + bias`` on axes.

    Attributes:
        axes: Eigenvectors of the curvature factor as columns, shape (D, D), float64.
        basis: ``Q``, eigenvectors of the input factor as columns, shape (F, R).
        along: Variances along each axis and each column of ``Q``, shape (D, R).
        across: Variances along each axis and perpendicular to ``Q``, shape (D,); ``None`` if ``Q`` is complete.
        bias: Variances of the bias along the axes, shape (D,), if the axes are also the eigenvectors of its block.
        common: Covariance of the bias, shape (D, D), float64, if its block has other eigenvectors.
    """

    axes: Tensor
    basis: Tensor
    along: Tensor
    across: Tensor | None = None
    bias: Tensor | None = None
    common: Tensor | None = None

    @classmethod
    def of(
        cls, axes: Tensor, basis: Tensor, along: Tensor, across: Tensor | None, bias: tuple[Tensor, Tensor] | None
    ) -> AxesAtFeatures:
        """Build the spread; ``bias`` holds the eigenvectors of the bias's block, and the variances along them."""
        wide = axes.double()
        if bias is None:
            return cls(wide, basis, along, across)
        vectors, variances = bias[0], bias[1].to(axes)
        if torch.equal(vectors, axes):
            return cls(wide, basis, along, across, variances)
        return cls(wide, basis, along, across, None, ((vectors * variances) @ vectors.T).double())

    @full_precision
    def __call__(self, phi: Tensor) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype]:
        """Return axes (D, D), variances along them (B, D), the covariance of the bias and the dtype, at features."""
        # An encoder converted after the fit has features of another dtype.
        wide = phi.to(self.basis.dtype)
        coordinates = wide @ self.basis
        squares = coordinates.square()
        values = squares @ self.along.T if self.bias is None else torch.addmm(self.bias, squares, self.along.T)
        if self.across is not None:
            left = (wide - coordinates @ self.basis.T).square().sum(1, keepdim=True)
            values = torch.addcmul(values, left, self.across)
        return self.axes, values, self.common, phi.dtype


@dataclass(frozen=True, eq=False)
class DenseAtFeatures:
    """Spread of outputs with dependent weights.

    Attributes:
        covariance: Covariance of ``[W.flatten(), b]``, shape (P, P), float64.
        dim: Number D of outputs.
    """

    covariance: Tensor
    dim: int

    @full_precision
    def __call__(self, phi: Tensor) -> tuple[Tensor]:
        """Return covariances (B, D, D) of the outputs, at features (B, F)."""
        wide, dim = phi.double(), self.dim
        width, weights = phi.shape[1], dim * phi.shape[1]
        by_layer = self.covariance[:weights, :weights].view(dim, width, dim, width)
        out = torch.einsum("bf,kflg,bg->bkl", wide, by_layer, wide)
        if len(self.covariance) > weights:
            of_both = self.covariance[:weights, weights:].view(dim, width, dim)
            mixed = torch.einsum("bf,kfl->bkl", wide, of_both)
            out = out + mixed + mixed.mT + self.covariance[weights:, weights:]
        return (out.to(phi.dtype),)
