"""A posterior precision ``G (x) A + delta I`` whose input factor ``A`` is of low rank with an isotropic rest.

In the eigenbasis ``u_j (x) q_k`` of the factors the precision has the eigenvalues ``g_j l_k + delta``, and ``g_j rho +
delta`` on all of the orthogonal complement of the ``q_k``, so every function of it has a closed form. No matrix of the
size of the features squared is formed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.fit.nystrom import LowRankMoment
from contrastive_curvature.laplace.output_spread import AxesSpread
from contrastive_curvature.network.full_precision import full_precision

__all__ = ["KronLowRank", "KronLowRankPrecision"]


@dataclass(frozen=True)
class KronLowRank:
    """The clamped curvature ``G (x) A`` of the weights (D, F) of a linear layer, and ``G`` of its bias.

    Args:
        vectors: Eigenvectors ``u_j`` of the curvature factor ``G`` as columns, shape (D, D).
        values: Its eigenvalues, not negative, shape (D,), float64.
        inputs: The input factor ``A``.
        bias: Eigenvectors and eigenvalues of the bias's block, or ``None`` without a bias.
    """

    vectors: Tensor
    values: Tensor
    inputs: LowRankMoment
    bias: tuple[Tensor, Tensor] | None

    @property
    def rank(self) -> int:
        """Number R of eigenvectors of the input factor."""
        return self.inputs.vectors.shape[1]

    def diag(self) -> Tensor:
        """Diagonal of the curvature, shape (P,)."""
        q, values, rest = self.inputs
        of_g = self.vectors.double().square() @ self.values
        of_a = rest + q.double().square() @ (values - rest)
        weight = torch.outer(of_g, of_a).flatten()
        if self.bias is None:
            return weight.to(q.dtype)
        return torch.cat([weight, self.bias[0].double().square() @ self.bias[1]]).to(q.dtype)


class KronLowRankPrecision:
    """``factor * curvature + prior``, decomposed; differentiable in the prior.

    Args:
        curvature: The clamped curvature.
        factor: What the likelihood multiplies it with.
        prior: Prior precision of all parameters, shape (1,), or of weight and bias, shape (2,).
    """

    def __init__(self, curvature: KronLowRank, factor: float | Tensor, prior: Tensor) -> None:
        self.curvature = curvature
        deltas = prior.double().expand(2) if prior.numel() == 1 else prior.double()
        self.deltas = deltas
        g, (_, values, rest) = factor * curvature.values, curvature.inputs
        self.along = torch.outer(g, values) + deltas[0]
        """Eigenvalues on ``u_j (x) q_k``, shape (D, R), float64."""
        self.across = g * rest + deltas[0]
        """Eigenvalues on the complement of the ``q_k``, shape (D,), float64."""
        self.of_bias = None if curvature.bias is None else factor * curvature.bias[1] + deltas[1]
        """Eigenvalues of the bias's block, shape (D,), float64, or ``None``."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(D, F)``."""
        return len(self.curvature.values), self.curvature.inputs.vectors.shape[0]

    def logdet(self) -> Tensor:
        """Log determinant, in float64."""
        return self._sum_of_logs(self.along, self.across, self.of_bias)

    def logdet_ratio(self) -> Tensor:
        """Log determinant of this over that of the prior, in float64; no large numbers cancel in it."""
        weight, bias = self.deltas.unbind()
        return self._sum_of_logs(
            self.along / weight, self.across / weight, None if self.of_bias is None else self.of_bias / bias
        )

    def _sum_of_logs(self, along: Tensor, across: Tensor, bias: Tensor | None) -> Tensor:
        spare = self.shape[1] - self.curvature.rank
        out = along.log().sum() + spare * across.log().sum()
        return out if bias is None else out + bias.log().sum()

    @full_precision
    def bmm(self, weights: Tensor, exponent: float = 1) -> Tensor:
        """Product of a power of the precision with vectors.

        Args:
            weights: Shape (..., P).
            exponent: The power.

        Returns:
            Shape (..., P).
        """
        flat = weights.reshape(-1, weights.shape[-1])
        (dim, width), u = self.shape, self.curvature.vectors
        matrix = u.T @ flat[:, : dim * width].view(-1, dim, width)
        along, across = self._split(matrix)
        out = (along * self.along.pow(exponent).to(flat.dtype)) @ self.curvature.inputs.vectors.T
        if across is not None:
            out = torch.addcmul(out, across, self.across.pow(exponent).to(flat.dtype).unsqueeze(1))
        parts = [(u @ out).flatten(1)]
        if self.curvature.bias is not None and self.of_bias is not None:
            q = self.curvature.bias[0]
            parts.append(((flat[:, dim * width :] @ q) * self.of_bias.pow(exponent).to(flat.dtype)) @ q.T)
        return torch.cat(parts, dim=1).view_as(weights)

    @full_precision
    def inv_square_form(self, jacobians: Tensor) -> Tensor:
        """``J Sigma J^T`` for Jacobians (B, D, P), shape (B, D, D)."""
        return jacobians @ self.bmm(jacobians, -1).mT

    def output_spread(self) -> AxesSpread:
        """Return what gives the covariances of the outputs at features."""
        basis, bias = self.curvature.inputs.vectors, None
        if self.curvature.bias is not None and self.of_bias is not None:
            bias = self.curvature.bias[0], self.of_bias.reciprocal()
        across = self.across.reciprocal().to(basis) if basis.shape[1] < basis.shape[0] else None
        return AxesSpread.of(self.curvature.vectors, basis, self.along.reciprocal().to(basis), across, bias)

    @full_precision
    def joint_covariance(self, phi: Tensor) -> Tensor:
        """Covariance of all outputs at features (B, F) together, shape (B D, B D)."""
        # An encoder that was converted after the fit has features of another dtype.
        wide = phi.to(self.curvature.inputs.vectors.dtype)
        u, (along, across) = self.curvature.vectors, self._split(wide)
        between = torch.einsum("ar,jr,br->jab", along, self.along.reciprocal().to(wide.dtype), along)
        if across is not None:
            between = between + self.across.reciprocal().to(wide.dtype).view(-1, 1, 1) * (across @ across.T)
        out = torch.einsum("dj,jab,ej->adbe", u, between, u)
        if self.curvature.bias is not None and self.of_bias is not None:
            q = self.curvature.bias[0]
            out = out + ((q * self.of_bias.reciprocal().to(wide.dtype)) @ q.T).unsqueeze(1)
        return out.reshape(phi.shape[0] * len(u), phi.shape[0] * len(u)).to(phi.dtype)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Coordinates (..., R) along the ``q_k``, and what is left (..., F); ``None`` at full rank."""
        q = self.curvature.inputs.vectors
        along = x @ q
        return along, None if q.shape[1] == q.shape[0] else x - along @ q.T
