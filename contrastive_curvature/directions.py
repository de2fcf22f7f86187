"""Mean and covariance of the direction ``x = z / |z|`` of uncertain embeddings, in closed form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.embedding import EmbeddingDistribution, sample_covariance
from contrastive_curvature.vmf._checks import unit

__all__ = ["Directions", "directions"]

_MOST = 1e8
"""Largest sum of relative variances: there the direction is random, and powers of more would overflow in float32."""


@dataclass(frozen=True)
class Directions:
    """Mean and covariance of N directions; of a diagonal covariance of the raw outputs only vectors are kept.

    The covariance is ``covariance`` if that is given, else ``diag(diagonal) + axis tilt^T + tilt axis^T``.

    Attributes:
        mean: Means of the unit vectors, norm at most 1, shape (N, D).
        diagonal: Shape (N, D).
        axis: Shape (N, D).
        tilt: Shape (N, D).
        covariance: Shape (N, D, D), or ``None``.
    """

    mean: Tensor
    diagonal: Tensor
    axis: Tensor
    tilt: Tensor
    covariance: Tensor | None = None

    def __getitem__(self, rows: Tensor | slice) -> Directions:
        """The directions of some of the rows."""
        covariance = None if self.covariance is None else self.covariance[rows]
        return Directions(self.mean[rows], self.diagonal[rows], self.axis[rows], self.tilt[rows], covariance)

    def to(self, dtype: torch.dtype) -> Directions:
        """The same in another precision."""
        covariance = None if self.covariance is None else self.covariance.to(dtype)
        mean, diagonal, axis, tilt = (v.to(dtype) for v in (self.mean, self.diagonal, self.axis, self.tilt))
        return Directions(mean, diagonal, axis, tilt, covariance)

    def dense(self) -> Tensor:
        """Covariances, shape (N, D, D)."""
        if self.covariance is not None:
            return self.covariance
        cross = self.axis.unsqueeze(2) * self.tilt.unsqueeze(1)
        return torch.diag_embed(self.diagonal) + cross + cross.mT


def directions(name: str, embeddings: EmbeddingDistribution | Tensor) -> Directions:
    """Return mean and covariance of the directions of embeddings.

    Of a tensor: its normalised rows, without spread. Of samples: mean and covariance of the normalised samples. Of a
    Gaussian ``N(m, V)`` over raw outputs, with ``n = |m|``, ``u = m / n``, ``S = V / n^2`` and ``P = I - u u^T``::

        tau = tr(P S P)      rho = u^T S u       c = P S u       q = tr((P S P)^2)
        g = (3 rho tau + 6 |c|^2 - 3/2 q) / (1 + tau)^2
        R^2 = 1 / ((1 + tau) (1 + g))                            (1 - g in place of 1 / (1 + g) where g < 0)
        zeta = (q / 2 + rho tau^2) / ((1 + tau)^2 (1 + tau + rho))
        E[x] = R u - c (1 + tau + rho)^(-3/2)
        Cov[x] = (1 - R^2 - zeta) / tau P S P + zeta u u^T

    ``R`` is exact to the second power of the covariance, ``E[x]`` and ``Cov[x]`` to the first, and the variance along
    ``u``, which starts with the second power, to that. Trace of the covariance and squared length of the mean add up to
    one, as for every unit vector, up to the second power of ``c``. With ``rho`` in it, the power keeps the mean inside
    the sphere, however large the spread.

    Args:
        name: Name of the argument, for error messages.
        embeddings: A distribution over N embeddings of dimension D, or a tensor of shape (N, D).

    Raises:
        InputTypeError: A tensor is not of a floating-point dtype.
        InputError: D < 2, an entry is not finite, or a row (of a sample) is zero.

    Source: derived for this library. Around the mean of the squared tangential length, ``|z|^2 = n^2 ((1 + r)^2 +
    tau)``, which is nearly constant in high dimension, the expansion in the rest converges also for large ``tau``; it
    gives the limits of an isotropic Gaussian of infinite variance to order 1 / D.
    """
    if isinstance(embeddings, Tensor):
        point, _ = unit(name, embeddings)
        return Directions(point, torch.zeros_like(point), point, torch.zeros_like(point))
    if embeddings._samples is not None:
        points, _ = unit(name, embeddings._samples)
        nothing = torch.zeros_like(points[0])
        return Directions(points.mean(0), nothing, nothing, nothing, sample_covariance(points))
    u, norm = unit(name, embeddings.mean)
    if embeddings._variance is not None:
        return _of_diagonal(u, _relative(embeddings._variance.to(u.dtype), norm))
    return _of_dense(u, _relative(embeddings.covariance.to(u.dtype), norm))


def _relative(spread: Tensor, norm: Tensor) -> Tensor:
    """``V / n^2`` of spreads (N, D) or (N, D, D), each scaled down as a whole where the direction is random anyway."""
    shape = (-1, *([1] * (spread.ndim - 1)))
    size = spread.detach().abs().flatten(1).amax(1)
    size = torch.where(size > 0, size, torch.ones_like(size))
    # In this order neither the square of a norm nor the quotient can overflow.
    relative = (size / norm / norm).clamp(max=_MOST / spread.shape[1])
    return spread / size.view(shape) * relative.view(shape)


def _scalars(tau: Tensor, rho: Tensor, bend: Tensor, square: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``R``, ``(1 - R^2 - zeta) / tau`` and ``zeta`` of tau, rho, ``|c|^2`` and q, each of shape (N,)."""
    tiny = torch.finfo(tau.dtype).tiny
    whole = 1 + tau
    # Divided by tau at once, because 1 - R^2 loses its digits where tau is small.
    ratio = (3 * rho * tau + 6 * bend - 1.5 * square) / (tau + tiny) / whole**2
    g = ratio * tau
    kept = torch.where(g > 0, 1 / (1 + g.clamp(min=0)), 1 - g)
    lost = torch.where(g > 0, ratio * kept, ratio)
    radial_by_tau = (square / (tau + tiny) / 2 + rho * tau) / whole**2 / (whole + rho)
    across = ((1 + lost) / whole - radial_by_tau).clamp(min=0)
    return (kept / whole).sqrt(), across, radial_by_tau * tau


def _of_diagonal(u: Tensor, spread: Tensor) -> Directions:
    pushed = spread * u
    rho = (pushed * u).sum(1)
    tau = (spread.sum(1) - rho).clamp(min=0)
    bend = (pushed.square().sum(1) - rho**2).clamp(min=0)
    square = (spread.square().sum(1) - 2 * pushed.square().sum(1) + rho**2).clamp(min=0)
    length, across, radial = (value.unsqueeze(1) for value in _scalars(tau, rho, bend, square))
    rho, whole = rho.unsqueeze(1), (1 + tau + rho).unsqueeze(1)
    mean = length * u - (pushed - rho * u) * whole**-1.5
    # P S P = S - u t^T - t u^T with t = S u - rho u / 2.
    return Directions(mean, across * spread, u, radial / 2 * u - across * (pushed - rho / 2 * u))


def _of_dense(u: Tensor, spread: Tensor) -> Directions:
    pushed = (spread @ u.unsqueeze(2)).squeeze(2)
    rho = (pushed * u).sum(1, keepdim=True)
    t = pushed - rho / 2 * u
    cross = u.unsqueeze(2) * t.unsqueeze(1)
    tangent = spread - cross - cross.mT
    tau = tangent.diagonal(dim1=1, dim2=2).sum(1).clamp(min=0)
    bend = (pushed - rho * u).square().sum(1)
    parts = _scalars(tau, rho.squeeze(1), bend, tangent.square().sum((1, 2)))
    length, across, radial = (value.unsqueeze(1) for value in parts)
    mean = length * u - (pushed - rho * u) * (1 + tau.unsqueeze(1) + rho) ** -1.5
    covariance = across.unsqueeze(2) * tangent + (radial * u).unsqueeze(2) * u.unsqueeze(1)
    nothing = torch.zeros_like(u)
    return Directions(mean, nothing, nothing, nothing, covariance)
