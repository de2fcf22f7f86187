"""The whole curvature as a matrix. Exact for every fix, for up to some thousands of weights.

It is always decomposed in float64. The eigenvalues of the precision ``factor * H + prior`` range from the prior to the
largest curvature, which grows with ``1 / norm^2`` of the outputs. For short outputs, float32 cannot hold this range.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.cross import CrossBlocks
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.network.pullback import Pullback
from contrastive_curvature.structures.finite import clamped_matrix, eigenpairs
from contrastive_curvature.structures.structure import Against, Clamped, Room, Structure, of_each_weight

_MOST_ROUNDING = 0.5
"""Of the prior precision, which alone decides the variances along directions without curvature."""


@dataclass(frozen=True, eq=False)
class Dense(Structure):
    """The matrix, shape (P, P); symmetric once it is complete."""

    name = "full"
    weights = ("last_layer", "all", "subnetwork")
    priors = ("scalar", "layerwise", "diag")

    matrix: Tensor

    @classmethod
    @override
    def term(cls, pullback: Pullback, context: Any, blocks: Blocks) -> Self:
        return cls(pullback.full(context, blocks))

    @classmethod
    @override
    def coupled_term(cls, pullback: Pullback, context: Any, hessian: OutputHessian) -> Self:
        return cls(pullback.coupled_full(context, hessian))

    @classmethod
    @override
    def cross(cls, pullback: Pullback, left: Any, right: Any, cross: CrossBlocks) -> Self:
        return cls(pullback.cross_full(left, right, cross))

    @classmethod
    @override
    def products(cls, left: Tensor, right: Tensor) -> Self:
        return cls(left.T @ right)

    @override
    def traces(self) -> Tensor:
        return self.matrix.diagonal().abs().sum().reshape(1)

    @override
    def reached(self, sizes: list[int]) -> Tensor:
        return torch.stack([part.any() for part in self.matrix.diagonal().split(sizes)])

    @override
    def positive(self) -> Self:
        return replace(self, matrix=clamped_matrix(self.plain()))

    @override
    def shapes(self, room: Room) -> dict[str, Any]:
        return {"matrix": (room.total, room.total)}

    @override
    def clamped(self, sizes: list[int]) -> ClampedDense:
        values, vectors = eigenpairs(self.plain().double())
        return ClampedDense(values.clamp(min=0), sizes, vectors, self.matrix.dtype)

    def plain(self) -> Tensor:
        """Return the symmetric matrix, shape (P, P)."""
        return (self.matrix + self.matrix.T) / 2


@dataclass(frozen=True, eq=False)
class ClampedDense(Clamped):
    """Eigenvectors of the matrix.

    Attributes:
        vectors: Eigenvectors as columns, shape (P, P), float64.
        summed: Dtype in which the curvature was summed.
    """

    vectors: Tensor
    summed: torch.dtype

    @override
    def into(self, v: Tensor) -> Tensor:
        return v @ self.vectors

    @override
    def out_of(self, x: Tensor) -> Tensor:
        return x @ self.vectors.T

    def against(self, prior: Tensor) -> Against:
        """See :meth:`Clamped.against`; every prior that is not one number needs its own decomposition."""
        d = of_each_weight(prior.double(), self.sizes)
        if prior.numel() == 1:
            return Against(self, d, 1.0)
        if self.vectors.requires_grad:
            raise UnsupportedError(
                "hessian_structure='full': the marginal likelihood has a gradient in the numbers of the loss only for "
                "one prior precision, because eigenvectors of equal eigenvalues have none."
            )
        scale = d.rsqrt()
        values, vectors = eigenpairs(scale.unsqueeze(1) * self._matrix() * scale)
        return Against(replace(self, values=values.clamp(min=0), vectors=vectors), torch.ones_like(d), scale)

    @override
    def sampler(self, prior: Tensor, factor: float | Tensor) -> Callable[[Tensor], Tensor]:
        self.warn_of_rounding(prior, factor)
        return super().sampler(prior, factor)

    @override
    def covariance(self, jacobians: Tensor, prior: Tensor, factor: float | Tensor) -> Tensor:
        self.warn_of_rounding(prior, factor)
        return super().covariance(jacobians, prior, factor)

    @override
    def diagonal_of(self, values: Tensor) -> Tensor:
        return (self.vectors.square() @ values).to(self.summed)

    def plain(self) -> Tensor:
        """Return the matrix, shape (P, P)."""
        return self._matrix().to(self.summed)

    @override
    def posterior_precision(self, prior: Tensor, factor: float | Tensor) -> Tensor:
        return super().posterior_precision(prior, factor).to(self.summed)

    def warn_of_rounding(self, prior: Tensor, factor: float | Tensor) -> None:
        """Warn if the curvature, summed in the encoder's dtype, has rounding errors as large as the prior."""
        rounding = torch.finfo(self.summed).eps * float(factor * self.diagonal().max())
        part = rounding / float(prior.min())
        if part > _MOST_ROUNDING:
            msg = (
                f"The curvature is rounded to {self.summed}, which is {100 * part:.3g} % of the prior precision, so "
                "variances may be off. Fit the encoder in float64, model.double(), or use optimize_prior_precision(), "
                "whose prior grows with the curvature."
            )
            warnings.warn(msg, UserWarning, stacklevel=2)

    def _matrix(self) -> Tensor:
        return (self.vectors * self.values) @ self.vectors.T
