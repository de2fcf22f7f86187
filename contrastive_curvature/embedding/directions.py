"""Mean and covariance of the direction ``x = z / |z|`` of uncertain embeddings, in closed form."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.spread import Diagonal, Samples, sample_covariance
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.vmf.checks import unit

_MOST = 1e8
"""Largest sum of relative variances: there the direction is random, and powers of more would lose all digits."""

_ENTRIES = 2**24
"""Numbers of a block of dense covariances that is computed at once."""


@dataclass(frozen=True)
class Directions:
    """Mean and covariance of N directions, float64; of a diagonal covariance of the raw outputs only vectors are kept.

    The covariance is ``covariance`` if that is given, else ``diag(diagonal) + axis tilt^T + tilt axis^T``.

    Attributes:
        mean: Means of the unit vectors, norm at most 1, shape (N, D).
        lost: ``1 - |mean|^2``, which rounds to zero if computed from a mean of nearly norm 1, shape (N,).
        diagonal: Shape (N, D).
        axis: Shape (N, D).
        tilt: Shape (N, D).
        covariance: Shape (N, D, D), or ``None``.
    """

    mean: Tensor
    lost: Tensor
    diagonal: Tensor
    axis: Tensor
    tilt: Tensor
    covariance: Tensor | None = None

    def __getitem__(self, rows: Tensor | slice) -> Directions:
        """Return the directions of some of the rows."""
        covariance = None if self.covariance is None else self.covariance[rows]
        return Directions(
            self.mean[rows], self.lost[rows], self.diagonal[rows], self.axis[rows], self.tilt[rows], covariance
        )

    def dense(self) -> Tensor:
        """Return covariances, shape (N, D, D)."""
        if self.covariance is not None:
            return self.covariance
        cross = self.axis.unsqueeze(2) * self.tilt.unsqueeze(1)
        return torch.diag_embed(self.diagonal) + cross + cross.mT

    def along(self, vectors: Tensor) -> Tensor:
        """Return variances ``v^T Cov v`` along a vector (N, D) each, shape (N,)."""
        if self.covariance is not None:
            return (vectors * (self.covariance @ vectors.unsqueeze(2)).squeeze(2)).sum(1)
        across = (self.axis * vectors).sum(1) * (self.tilt * vectors).sum(1)
        return (self.diagonal * vectors.square()).sum(1) + 2 * across


def check_embeddings(name: str, value: object) -> Tensor:
    """Return the raw means (N, D), N >= 1, of a distribution or a tensor of embeddings; raise for anything else."""
    if not isinstance(value, (EmbeddingDistribution, Tensor)):
        wanted = "an EmbeddingDistribution, or a tensor of embeddings"
        raise InputTypeError(expected(name, wanted, f"a {type(value).__name__}"))
    mean = value if isinstance(value, Tensor) else value.raw_mean
    if mean.ndim != 2 or not len(mean):
        raise InputError(expected(name, "embeddings (N, D), N >= 1", f"shape {tuple(mean.shape)}"))
    return mean


def directions(name: str, embeddings: EmbeddingDistribution | Tensor) -> Directions:
    """Return mean and covariance of the directions of embeddings, in float64.

    In float32 the cosine of two embeddings that nearly agree would have lost its distance from one, and its variance.

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

    Source: derived for this library. Around the mean of the squared tangential length, ``|z|^2 = n^2 ((1 + r)^2 +
    tau)``, which is nearly constant in high dimension, the expansion in the rest converges also for large ``tau``; it
    gives the limits of an isotropic Gaussian of infinite variance to order 1 / D.
    """
    if isinstance(embeddings, Tensor):
        point, _ = unit(name, validate.real(name, embeddings).double())
        nothing = torch.zeros_like(point)
        return Directions(point, nothing[:, 0], nothing, point, nothing)
    if isinstance(embeddings.spread, Samples):
        points, _ = unit(name, embeddings.spread.samples.double())
        mean, spread = points.mean(1), sample_covariance(points)
        lost = spread.diagonal(dim1=1, dim2=2).sum(1) * (1 - 1 / points.shape[1])
        nothing = torch.zeros_like(mean)
        return Directions(mean, lost, nothing, nothing, nothing, spread)
    u, norm = unit(name, embeddings.raw_mean.double())
    if isinstance(embeddings.spread, Diagonal):
        return _of_diagonal(u, _relative(embeddings.variance.double(), norm))
    step = max(1, _ENTRIES // u.shape[1] ** 2)
    chunks = zip(*(value.split(step) for value in (u, norm, embeddings.covariance)), strict=True)
    parts = [_of_dense(v, _relative(spread.double(), n)) for v, n, spread in chunks]
    return Directions(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Directions)))


def _relative(spread: Tensor, norm: Tensor) -> Tensor:
    """Return ``V / n^2`` of spreads (N, D) or (N, D, D), scaled down as a whole where the direction is random."""
    shape = (-1, *([1] * (spread.ndim - 1)))
    size = spread.detach().abs().flatten(1).amax(1)
    size = torch.where(size > 0, size, torch.ones_like(size))
    # In this order neither the square of a norm nor the quotient can overflow.
    relative = (size / norm / norm).clamp(max=_MOST / spread.shape[1])
    return spread / size.view(shape) * relative.view(shape)


def _scalars(tau: Tensor, rho: Tensor, bend: Tensor, square: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``R``, ``(1 - R^2 - zeta) / tau``, ``zeta`` and ``1 - |E[x]|^2``, shape (N,) each."""
    tiny = torch.finfo(tau.dtype).tiny
    whole = 1 + tau
    # Divided by tau at once, because 1 - R^2 loses its digits where tau is small.
    ratio = (3 * rho * tau + 6 * bend - 1.5 * square) / (tau + tiny) / whole**2
    g = ratio * tau
    kept = torch.where(g > 0, 1 / (1 + g.clamp(min=0)), 1 - g)
    shorter = torch.where(g > 0, ratio * kept, ratio)
    radial_by_tau = (square / (tau + tiny) / 2 + rho * tau) / whole**2 / (whole + rho)
    by_tau = (1 + shorter) / whole
    lost = (tau * by_tau - bend * (whole + rho) ** -3).clamp(min=0)
    return (kept / whole).sqrt(), (by_tau - radial_by_tau).clamp(min=0), radial_by_tau * tau, lost


def _of_diagonal(u: Tensor, spread: Tensor) -> Directions:
    pushed = spread * u
    rho = (pushed * u).sum(1)
    tau = (spread.sum(1) - rho).clamp(min=0)
    bend = (pushed.square().sum(1) - rho**2).clamp(min=0)
    square = (spread.square().sum(1) - 2 * pushed.square().sum(1) + rho**2).clamp(min=0)
    *parts, lost = _scalars(tau, rho, bend, square)
    length, across, radial = (value.unsqueeze(1) for value in parts)
    rho, whole = rho.unsqueeze(1), (1 + tau + rho).unsqueeze(1)
    mean = length * u - (pushed - rho * u) * whole**-1.5
    # P S P = S - u t^T - t u^T with t = S u - rho u / 2.
    return Directions(mean, lost, across * spread, u, radial / 2 * u - across * (pushed - rho / 2 * u))


def _of_dense(u: Tensor, spread: Tensor) -> Directions:
    pushed = (spread @ u.unsqueeze(2)).squeeze(2)
    rho = (pushed * u).sum(1, keepdim=True)
    t = pushed - rho / 2 * u
    cross = u.unsqueeze(2) * t.unsqueeze(1)
    tangent = spread - cross - cross.mT
    tau = tangent.diagonal(dim1=1, dim2=2).sum(1).clamp(min=0)
    bend = (pushed - rho * u).square().sum(1)
    *parts, lost = _scalars(tau, rho.squeeze(1), bend, tangent.square().sum((1, 2)))
    length, across, radial = (value.unsqueeze(1) for value in parts)
    mean = length * u - (pushed - rho * u) * (1 + tau.unsqueeze(1) + rho) ** -1.5
    covariance = across.unsqueeze(2) * tangent + (radial * u).unsqueeze(2) * u.unsqueeze(1)
    nothing = torch.zeros_like(u)
    return Directions(mean, lost, nothing, nothing, nothing, covariance)
