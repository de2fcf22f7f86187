"""How the outputs of a last layer spread at given features: all of a posterior that a prediction needs.

It is made once for a curvature, a prior and a temperature (:meth:`.LastLayerLaplace.output_spread`), and exported as it
is (:mod:`contrastive_curvature.io.serving`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.embedding.spread import Axes, Dense, Diagonal
from contrastive_curvature.network.full_precision import full_precision
from contrastive_curvature.network.last_layer import diag_last_layer_variance


@dataclass(frozen=True, eq=False)
class DiagonalSpread:
    """Of independent weights.

    Attributes:
        variance: Of ``[W.flatten(), b]``, shape (P,).
        dim: Number D of outputs.
    """

    variance: Tensor
    dim: int

    def __call__(self, phi: Tensor) -> Diagonal:
        """Return the spread at features (B, F)."""
        return Diagonal(diag_last_layer_variance(phi, self.variance, self.dim))


@dataclass(frozen=True, eq=False)
class AxesSpread:
    """Of a Kronecker-factored posterior: variances ``along (Q^T phi)^2 + across |phi - Q Q^T phi|^2 + bias`` on axes.

    Attributes:
        axes: Eigenvectors of the curvature factor as columns, shape (D, D).
        basis: ``Q``, eigenvectors of the input factor as columns, shape (F, R).
        along: Variances along both, shape (D, R).
        across: Variances along an axis and perpendicular to ``Q``, shape (D,); ``None`` where ``Q`` is complete.
        bias: Variances of the bias along the axes, shape (D,), where they are the eigenvectors of its block, too.
        common: Covariance of the bias, shape (D, D), where it has other ones.
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
    ) -> AxesSpread:
        """Return the spread, from the eigenvectors and variances of the bias among others; ``None`` without one."""
        if bias is None:
            return cls(axes, basis, along, across)
        vectors, variances = bias[0], bias[1].to(axes)
        if torch.equal(vectors, axes):
            return cls(axes, basis, along, across, variances)
        return cls(axes, basis, along, across, None, (vectors * variances) @ vectors.T)

    def bias_covariance(self) -> Tensor | None:
        """Return the covariance of the bias, shape (D, D), or ``None`` without one."""
        return self.common if self.bias is None else (self.axes * self.bias) @ self.axes.T

    @full_precision
    def __call__(self, phi: Tensor) -> Axes:
        """Return the spread at features (B, F)."""
        # An encoder that was converted after the fit has features of another dtype.
        wide = phi.to(self.basis.dtype)
        coordinates = wide @ self.basis
        squares = coordinates.square()
        values = squares @ self.along.T if self.bias is None else torch.addmm(self.bias, squares, self.along.T)
        if self.across is not None:
            left = (wide - coordinates @ self.basis.T).square().sum(1, keepdim=True)
            values = torch.addcmul(values, left, self.across)
        return Axes(self.axes, values, self.common, phi.dtype)


@dataclass(frozen=True, eq=False)
class DenseSpread:
    """Of a dense posterior.

    Attributes:
        covariance: Of ``[W.flatten(), b]``, shape (P, P), float64.
        dim: Number D of outputs.
    """

    covariance: Tensor
    dim: int

    def __call__(self, phi: Tensor) -> Dense:
        """Return the spread at features (B, F)."""
        return Dense(_dense_covariance(phi.double(), self.covariance, self.dim).to(phi.dtype))


@full_precision
def _dense_covariance(phi: Tensor, covariance: Tensor, dim: int) -> Tensor:
    """Return covariances (B, D, D) of the outputs at features (B, F), under a covariance (P, P) of weight and bias."""
    width = phi.shape[1]
    weights = dim * width
    by_layer = covariance[:weights, :weights].view(dim, width, dim, width)
    out = torch.einsum("bf,kflg,bg->bkl", phi, by_layer, phi)
    if covariance.shape[0] > weights:
        mixed = torch.einsum("bf,kfl->bkl", phi, covariance[:weights, weights:].view(dim, width, dim))
        out = out + mixed + mixed.mT + covariance[weights:, weights:]
    return out
