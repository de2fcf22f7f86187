"""Kronecker factors: the curvature of a layer's weight as ``G (x) A`` (K-FAC).

``A`` is the mean of ``a a^T`` over the inputs ``a`` of the layer (for a convolution, over the positions of a point and
then over points), and ``G = sum_i B_i^T H_ii B_i`` with the Jacobian ``B_i`` of the raw outputs with respect to the
layer's outputs (:mod:`contrastive_curvature.network.layerwise`). Cross terms between points are left out, so the
curvature of coupled fixes is several times too large (``docs/theory.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature.errors import InputError
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.network.pullback import KronFactors, Pullback
from contrastive_curvature.structures.at_features import AtFeatures, AxesAtFeatures
from contrastive_curvature.structures.finite import clamped_matrix, eigenpairs
from contrastive_curvature.structures.structure import Clamped, Room, Structure, of_each_weight


@dataclass(frozen=True, eq=False)
class Kron(Structure):
    """Factors of every parameter.

    Attributes:
        factors: ``[G, sum_i a_i a_i^T]`` for a matrix, ``[block]`` for a vector; ``KronLowRank`` has two parts for the
            inputs, so the code reads them as ``[g, *moment]``.
        points: Number of points behind the sums over inputs, shape ().
    """

    name = "kron"
    couples = False
    mc_estimable = True

    factors: KronFactors
    points: Tensor

    @classmethod
    @override
    def term(cls, pullback: Pullback, context: Any, blocks: Blocks) -> Self:
        return cls(pullback.kron(context, blocks), blocks.u.new_full((), len(blocks), dtype=torch.float64))

    def positive(self) -> Self:
        """See :meth:`Structure.positive`; the moments of the inputs have no negative eigenvalues."""
        return replace(self, factors=[[clamped_matrix(g), *moment] for g, *moment in self.factors])

    def traces(self) -> Tensor:
        """See :meth:`Structure.traces`; absolute traces of the curvature factors."""
        return torch.stack([group[0].diagonal().abs().sum() for group in self.factors])

    @override
    def reached(self, sizes: list[int]) -> Tensor:
        return torch.stack([group[0].any() for group in self.factors])

    def scaled(self, number: float | Tensor) -> Self:
        """See :meth:`Structure.scaled`; the number multiplies only one of the two factors."""
        return replace(self, factors=[[number * g, *moment] for g, *moment in self.factors])

    @override
    def shapes(self, room: Room) -> dict[str, Any]:
        if len(self.factors) != len(room.parameters):
            wanted = f"factors of {len(room.parameters)} parameters"
            raise InputError("curvature", wanted, len(self.factors))
        groups = zip(room.parameters, self.factors, strict=True)
        return {"factors": [[(n, n) for n in _rows(p, group)] for p, group in groups], "points": torch.float64}

    @override
    def clamped(self, sizes: list[int]) -> ClampedKron:
        pairs = [[eigenpairs(factor) for factor in group] for group in self.plain()]
        eigenvalues = [[values.clamp(min=0) for values, _ in group] for group in pairs]
        vectors = [[vectors for _, vectors in group] for group in pairs]
        return ClampedKron(_outer(eigenvalues), sizes, eigenvalues, vectors)

    def factors_of(self, clamped: Clamped) -> KronFactors:
        """Return the factors of every parameter, with what ``clamped`` keeps of the factors of the inputs."""
        del clamped
        return self.plain()

    def plain(self) -> KronFactors:
        """Return ``[G, A]`` of every matrix, with the mean ``A``, and ``[block]`` of every vector."""
        return [[g, *(part / self.points.to(part) for part in moment)] for g, *moment in self.factors]


class EigenFactors(NamedTuple):
    """Eigenvectors as columns, and eigenvalues, of each factor of each parameter."""

    vectors: list[list[Tensor]]
    values: list[list[Tensor]]


@dataclass(frozen=True, eq=False)
class ClampedKron(Clamped):
    """Eigenvectors and eigenvalues of all factors.

    Attributes:
        eigenvalues: Eigenvalues of each factor, not negative, ascending.
        vectors: Eigenvectors of each factor, as columns.
    """

    eigenvalues: list[list[Tensor]]
    vectors: list[list[Tensor]]

    @override
    def into(self, v: Tensor) -> Tensor:
        return self._turned(v, [[factor.mT for factor in group] for group in self.vectors])

    @override
    def out_of(self, x: Tensor) -> Tensor:
        return self._turned(x, self.vectors)

    @override
    def draw(self, noise: Tensor, deviations: Tensor) -> Tensor:
        # An orthogonal matrix leaves the law of standard normal numbers as it is, and turning them costs a product with
        # every factor.
        return self.out_of(noise * deviations)

    @override
    def diagonal_of(self, values: Tensor) -> Tensor:
        return self._turned(values, [[factor.square() for factor in group] for group in self.vectors])

    @override
    def plain(self) -> EigenFactors:
        return EigenFactors(self.vectors, self.eigenvalues)

    def at_features(self, dim: int, prior: Tensor, factor: float | Tensor) -> AtFeatures:
        """See :meth:`Clamped.at_features`; one linear layer, variances ``1 / (factor g_k a_f + prior)``."""
        variances = 1 / self.precision(of_each_weight(prior, self.sizes), factor)
        of_weight, *of_bias = variances.to(self.values.dtype).split(self.sizes)
        (axes, basis), *bias = self.vectors
        spread = (bias[0][0], of_bias[0]) if bias else None
        return AxesAtFeatures.of(axes, basis, of_weight.view(dim, -1), None, spread)

    def _turned(self, rows: Tensor, matrices: list[list[Tensor]]) -> Tensor:
        """Return ``M v`` of rows ``v`` (..., P), with the Kronecker products ``M`` of the matrices."""
        out = []
        for part, (left, *right) in zip(rows.split(self.sizes, -1), matrices, strict=True):
            if right:
                block = part.unflatten(-1, (len(left), len(right[0])))
                out.append((left @ block @ right[0].mT).flatten(-2))
            else:
                out.append(part @ left.mT)
        return torch.cat(out, -1)


def _rows(p: Tensor, group: Sequence[Any]) -> tuple[int, ...]:
    """Return the rows of each factor of a parameter; their product is the number of entries of the parameter."""
    if len(group) == 1:
        return (p.numel(),)
    rows = len(group[0])
    return (rows, p.numel() // rows) if rows and p.numel() % rows == 0 else (len(p), p[0].numel())


def _outer(groups: list[list[Tensor]]) -> Tensor:
    """Return the outer product of the vectors in every group, concatenated."""
    return torch.cat([group[0] if len(group) == 1 else torch.outer(*group).flatten() for group in groups])
