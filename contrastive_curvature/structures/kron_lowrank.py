"""Kronecker factors of a last layer at any number of features: the input factor is of low rank, with an isotropic rest.

In the eigenbasis ``u_j (x) q_k`` of the factors ``G`` and ``A = Q diag(l) Q^T + rho (I - Q Q^T)`` the precision has the
eigenvalues ``g_j l_k + prior``, and ``g_j rho + prior`` on the whole orthogonal complement of the ``q_k``. No matrix
(F, F) of the features is formed. ``Q`` and ``l`` are leading eigenvectors and eigenvalues of the mean ``phi phi^T`` of
the features, ``rho`` is the mean of the other eigenvalues, as in probabilistic principal component analysis (Tipping
and Bishop, 1999). They come from a sketch of ``A`` (:mod:`contrastive_curvature.network.last_layer`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from contrastive_curvature.network.last_layer import sketch_size
from contrastive_curvature.network.pullback import KronFactors
from contrastive_curvature.structures.at_features import AtFeatures, AxesAtFeatures
from contrastive_curvature.structures.finite import eigenpairs
from contrastive_curvature.structures.kron import EigenFactors, Kron
from contrastive_curvature.structures.nystrom import LowRankMoment, low_rank_moment
from contrastive_curvature.structures.structure import Against, Clamped, Room


@dataclass(frozen=True, eq=False)
class KronLowRank(Kron):
    """The factors ``[[G, A Omega, trace], [G of the bias]]``, with the test matrix ``Omega`` of the sketch."""

    name = "kron_lowrank"
    weights = ("last_layer",)
    options = ("rank",)

    @override
    def shapes(self, room: Room) -> dict[str, Any]:
        dim, width = room.parameters[0].shape
        weight = [(dim, dim), (width, sketch_size(width, room.rank)), (1,)]
        return {"factors": [weight, [(dim, dim)]][: len(room.parameters)], "points": torch.float64}

    @override
    def factors_of(self, clamped: Any) -> KronFactors:
        (g, *_), *bias = self.plain()
        return [[g, clamped.inputs.dense()], *bias]

    def clamped(self, sizes: list[int], rank: int | None = None) -> ClampedKronLowRank:  # type: ignore[override]
        """See :meth:`Structure.clamped`.

        Args:
            sizes: Numbers of entries of the weight and of the bias.
            rank: Number R of eigenvectors of the input factor to keep; ``None`` chooses it from the spectrum.
        """
        (g, sketch, trace), *rest = self.plain()
        of_g, axes = _positive_eigenpairs(g)
        moment = low_rank_moment(sketch, trace, rank)
        bias = _positive_eigenpairs(rest[0][0]) if rest else None
        parts = [torch.outer(of_g, moment.values).flatten()]
        if moment.vectors.shape[1] < len(moment.vectors):
            parts.append((of_g * moment.rest).repeat_interleave(len(moment.vectors)))
        if bias is not None:
            parts.append(bias[0])
        return ClampedKronLowRank(torch.cat(parts), sizes, of_g, axes, moment, None if bias is None else bias[1])


@dataclass(frozen=True, eq=False)
class ClampedKronLowRank(Clamped):
    """The columns of ``B``: ``u_j (x) q_k``, then ``u_j (x) (I - Q Q^T)``, F columns of rank F - R, then the bias.

    So ``B B^T`` is the identity, and a function of ``H`` is the same function of the values in this basis.

    Attributes:
        of_g: Eigenvalues of ``G``, not negative, shape (D,); float64, like ``values``.
        axes: Eigenvectors ``u_j`` of ``G`` as columns, shape (D, D).
        inputs: The input factor ``A``.
        bias: Eigenvectors of the bias's block as columns, shape (D, D), or ``None`` without a bias.
    """

    of_g: Tensor
    axes: Tensor
    inputs: LowRankMoment
    bias: Tensor | None

    @property
    def rank(self) -> int:
        """Number R of eigenvectors of the input factor."""
        return self.inputs.vectors.shape[1]

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.axes.dtype

    @property
    def times(self) -> Tensor:
        """See :attr:`Clamped.times`; the F columns of the complement count as F - R eigenvalues."""
        along, across, bias = self._split(torch.ones_like(self.values))
        return self._joined(along, across * (1 - self.rank / self._width), bias)

    @override
    def into(self, v: Tensor) -> Tensor:
        q = self.inputs.vectors
        weight = self.axes.T @ v[..., : self.sizes[0]].unflatten(-1, (len(self.axes), self._width))
        along = weight @ q
        across = weight - along @ q.T if self.rank < self._width else weight[..., :0]
        return self._joined(along, across, None if self.bias is None else v[..., self.sizes[0] :] @ self.bias)

    @override
    def out_of(self, x: Tensor) -> Tensor:
        along, across, bias = self._split(x)
        weight = along @ self.inputs.vectors.T
        parts = [(self.axes @ (weight + across if self.rank < self._width else weight)).flatten(-2)]
        return torch.cat(parts if self.bias is None else [*parts, bias @ self.bias.T], -1)

    @override
    def against(self, prior: Tensor) -> Against:
        weight, bias = prior.reshape(-1)[0], prior.reshape(-1)[-1]
        along, across, of_bias = self._split(torch.ones_like(self.values))
        return Against(self, self._joined(along * weight, across * weight, of_bias * bias), 1.0)

    @override
    def diagonal_of(self, values: Tensor) -> Tensor:
        along, across, bias = self._split(values)
        squares = self.inputs.vectors.double().square()
        weight = along @ squares.T
        if self.rank < self._width:
            weight = weight + across * (1 - squares.sum(1))
        parts = [(self.axes.double().square() @ weight).flatten()]
        if self.bias is not None:
            parts.append(self.bias.double().square() @ bias)
        return torch.cat(parts).to(self.axes.dtype)

    @override
    def plain(self) -> EigenFactors:
        """Return the factors of all features: the kept eigenvectors, and a basis (F, F - R) of the complement."""
        q, values, rest = self.inputs
        # The columns after the R-th of the whole factor are orthogonal to the kept ones.
        complement = torch.linalg.qr(q, mode="complete").Q[:, self.rank :]
        of_inputs = torch.cat([values, rest.expand(complement.shape[1])])
        bias = [] if self.bias is None else [[self._split(self.values)[2].to(q.dtype)]]
        return EigenFactors(
            [[self.axes, torch.cat([q, complement], 1)], *([] if self.bias is None else [[self.bias]])],
            [[self.of_g.to(q.dtype), of_inputs.to(q.dtype)], *bias],
        )

    @override
    def at_features(self, dim: int, prior: Tensor, factor: float | Tensor) -> AtFeatures:
        basis, d, _ = self.against(prior.double())
        along, across, bias = self._split(1 / basis.precision(d, factor))
        perpendicular = across[:, 0].to(self.axes) if self.rank < self._width else None
        spread = None if self.bias is None else (self.bias, bias)
        return AxesAtFeatures.of(self.axes, self.inputs.vectors, along.to(self.axes), perpendicular, spread)

    @property
    def _width(self) -> int:
        return len(self.inputs.vectors)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return coordinates (..., D, R), coordinates in the complement (..., D, F) or (..., D, 0), and of the bias."""
        dim = len(self.axes)
        width = self._width if self.rank < self._width else 0
        sizes = [dim * self.rank, dim * width, x.shape[-1] - dim * (self.rank + width)]
        along, across, bias = x.split(sizes, -1)
        return along.unflatten(-1, (dim, self.rank)), across.unflatten(-1, (dim, width)), bias

    def _joined(self, along: Tensor, across: Tensor, bias: Tensor | None) -> Tensor:
        return torch.cat([along.flatten(-2), across.flatten(-2), *([] if bias is None else [bias])], -1)


def _positive_eigenpairs(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues in float64, negative ones set to zero, and eigenvectors in the dtype of the factor."""
    values, vectors = eigenpairs(factor.double())
    return values.clamp(min=0), vectors.to(factor.dtype)
