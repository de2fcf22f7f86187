"""How similar two uncertain embeddings are: the distribution of the cosine between them.

It follows in closed form from the mean and covariance of each direction ``x = z / |z|``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.embedding.distribution import EmbeddingDistribution
from contrastive_curvature.embedding.spread import DiagonalSpread, Samples, Spread
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.vmf.checks import unit

_ENTRIES = 2**24
"""Numbers in one block of covariances or of pairs: 128 MiB in float64."""

_IN_CACHE = 2**18
"""Numbers in one block of covariances that are read once."""

_MOST = 1e8
"""Largest sum of relative variances: there the direction is random, and powers of more would lose all digits."""

_CANCELS = 1e-4
"""Below it ``1 - cosine`` of two directions comes from their difference, because a product has lost its digits."""

_EQUAL = 8 * torch.finfo(torch.float64).eps
"""Unit vectors that are no further apart are equal: one of them is the other, scaled."""


@dataclass(frozen=True, eq=False)
class CosineDistribution:
    """Distribution of the cosines between uncertain embeddings, as :func:`similarity` returns it.

    Attributes:
        mean: Expected cosines, in [-1, 1], shape (N,) or (N, M).
        variance: Variances of the cosines, of the same shape.
        complement: ``1 - mean`` in float64, of the same shape, with the digits that a mean near 1 loses by rounding;
            ``None``: computed from the mean.
    """

    mean: Tensor
    variance: Tensor
    complement: Tensor | None = None

    @property
    def std(self) -> Tensor:
        """Standard deviations of the cosines, of the shape of the mean."""
        return self.variance.sqrt()

    def probability(self, threshold: float | Tensor) -> Tensor:
        """Return the probability that the cosine reaches a threshold.

        ``(1 + cosine) / 2`` is approximated by the Beta distribution of the same mean and variance. This keeps the
        cosine in [-1, 1]; for two equal directions it becomes the scaled chi-square distribution of ``1 - cosine``, and
        for two directions at an angle a normal distribution. Without spread the probability is 0 or 1.

        Args:
            threshold: A cosine in [-1, 1], or a tensor of them that broadcasts with the mean.

        Returns:
            ``P(cosine >= threshold)``, of the shape, dtype and device of the mean, without a graph: scipy computes the
            incomplete beta function on the CPU. ``mean`` and ``variance`` have gradients.

        Raises:
            InputTypeError: ``threshold`` is not a real number or tensor.
            InputError: ``threshold`` is outside [-1, 1] or NaN, or does not broadcast to the shape of the mean.
        """
        from scipy.special import betainc  # slow, so only a probability imports it

        limit = self._check_threshold(threshold)
        mean, variance = self.mean.detach().cpu().double(), self.variance.detach().cpu().double()
        below = 1 - mean if self.complement is None else self.complement.detach().cpu().double()
        size = below * (2 - below) / torch.where(variance > 0, variance, torch.ones_like(variance)) - 1
        spread = (variance > 0) & (below > 0) & (below < 2)
        size = torch.where(spread, size, torch.ones_like(size)).clamp(min=1e-9)
        share = torch.where(spread, below / 2, torch.full_like(mean, 0.5))
        above = torch.from_numpy(betainc((share * size).numpy(), ((1 - share) * size).numpy(), (1 - limit).numpy() / 2))
        # A threshold equal to the rounded mean counts as reached.
        certain = (below <= 1 - limit) | ((mean == limit) & (limit < 1))
        return torch.where(spread, above, certain.double()).to(self.mean)

    def _check_threshold(self, threshold: object) -> Tensor:
        wanted = "a cosine in [-1, 1]"
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float, Tensor)):
            raise InputTypeError("threshold", f"{wanted}, or a tensor of them", threshold)
        if isinstance(threshold, Tensor) and (threshold.is_complex() or threshold.dtype == torch.bool):
            raise InputTypeError("threshold", f"{wanted}, or a tensor of them", f"dtype {threshold.dtype}")
        limit = torch.as_tensor(threshold, device="cpu").detach().double()
        if not bool((limit.abs() <= 1).all()):
            got = f"numbers from {float(limit.min())} to {float(limit.max())}"
            raise InputError("threshold", wanted, got)
        try:
            return limit.expand(self.mean.shape)
        except RuntimeError:
            got = f"shape {tuple(limit.shape)}"
            wanted = f"a shape that expands to {tuple(self.mean.shape)}, that of the mean"
            raise InputError("threshold", wanted, got) from None


def similarity(
    a: EmbeddingDistribution | Tensor, b: EmbeddingDistribution | Tensor, *, pairwise: bool = False
) -> CosineDistribution:
    """Return the distribution of the cosine between independent uncertain embeddings, in closed form.

    With mean ``m`` and covariance ``C`` of each direction, ``E[cos] = m_a . m_b`` and ``Var[cos] = m_a^T C_b m_a +
    m_b^T C_a m_b + tr(C_a C_b)`` are exact for independent directions;
    :func:`contrastive_curvature.embedding.similarity.directions` gives ``m`` and ``C``, to second order in the spread
    of the raw outputs. A pair takes O(D) for diagonal covariances and O(D^2) for dense ones, in float64. The closed
    form fails in two or three dimensions if the norm of a raw output may reach zero, and if one or two directions have
    most of the spread (``docs/statistics.md``).

    Args:
        a: Distribution over N embeddings of dimension D, or a tensor of embeddings without uncertainty, of any norm,
            shape (N, D). At most one argument may be a tensor.
        b: M embeddings in either form, on the same device.
        pairwise: If true, compare all N x M pairs, in blocks; if false, row i of ``a`` with row i of ``b``, N = M.

    Returns:
        Mean and variance of the cosines, shape (N,), or (N, M) if ``pairwise``. A distribution from samples uses the
        mean and the covariance of its normalised samples. The two embeddings of a pair count as independent, even if
        samples of both come from the same networks.

    Raises:
        InputTypeError: An argument has a wrong type, or both are tensors.
        InputError: The dimensions, the devices or (without ``pairwise``) the numbers of embeddings differ; there are no
            embeddings; an entry is not finite; or a row is zero.
    """
    validate.flag("pairwise", pairwise)
    first, second = check_embeddings("a", a), check_embeddings("b", b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        hint = "The cosine of two tensors is a number: torch.nn.functional.cosine_similarity(a, b)."
        raise InputTypeError("a, b", "an EmbeddingDistribution for at least one of them", "two tensors", hint)
    if first.device != second.device:
        raise InputError("b", f"device {first.device}, that of a", str(second.device))
    if first.shape[1] != second.shape[1]:
        raise InputError("b", f"D = {first.shape[1]}, that of a", f"D = {second.shape[1]}")
    if not pairwise and len(first) != len(second):
        hint = "For all pairs, pass pairwise=True."
        raise InputError("b", f"{len(first)} embeddings, as many as in a", len(second), hint)
    out = cosine_distribution(directions("a", a), directions("b", b), pairwise=pairwise)
    # Half precision becomes float32.
    dtype = torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)
    return CosineDistribution(out.mean.to(dtype), out.variance.to(dtype), out.complement)


def cosine_distribution(a: Directions, b: Directions, *, pairwise: bool) -> CosineDistribution:
    """Compute :func:`similarity` in float64 from directions (N, D) and (M, D); M = N unless ``pairwise``."""
    n, m, dim = len(a.mean), len(b.mean), a.mean.shape[1]
    width = dim if _is_thin(a, b) else dim * dim
    if not pairwise:
        step = max(1, _IN_CACHE // width)
        parts = [
            _bounded(_complement(x.mean, x.lost, y.mean, y.lost), _variance(x, y, lambda s, t: (s * t).sum(-1)))
            for x, y in ((a[i : i + step], b[i : i + step]) for i in range(0, n, step))
        ]
        return CosineDistribution(*(torch.cat(part) for part in zip(*parts, strict=True)))
    columns = max(1, min(m, _ENTRIES // width))
    rows = max(1, min(n, _ENTRIES // max(width, columns)))
    blocks = [
        [_pair_moments(a[i : i + rows], b[j : j + columns]) for j in range(0, m, columns)] for i in range(0, n, rows)
    ]
    return CosineDistribution(
        *(torch.cat([torch.cat([block[k] for block in row], 1) for row in blocks]) for k in range(3))
    )


def _pair_moments(a: Directions, b: Directions) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, variance and complement of all pairs, shape (N, M)."""
    complement = 1 - a.mean @ b.mean.mT
    for few in (complement < _CANCELS).nonzero().split(max(1, _ENTRIES // a.mean.shape[1])):
        i, j = few.unbind(1)
        complement = complement.index_put((i, j), _complement(a.mean[i], a.lost[i], b.mean[j], b.lost[j]))
    return _bounded(complement, _variance(a, b, lambda x, y: x @ y.mT))


def _is_thin(a: Directions, b: Directions) -> bool:
    return isinstance(a.spread, DiagonalSpread) and isinstance(b.spread, DiagonalSpread)


def _complement(a: Tensor, lost_a: Tensor, b: Tensor, lost_b: Tensor) -> Tensor:
    """Return ``1 - a . b = (1 - |a|^2 + 1 - |b|^2 + |a - b|^2) / 2`` of rows (N, D), shape (N,)."""
    apart = (a - b).square().sum(1)
    return (lost_a + lost_b + torch.where(apart > _EQUAL**2, apart, 0)) / 2


def _bounded(complement: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, variance and complement, within the largest variance that a cosine of this mean can have."""
    complement = complement.clamp(0, 2)
    variance = torch.minimum(variance.clamp(min=0), complement * (2 - complement))
    return 1 - complement, variance, complement


def _variance(a: Directions, b: Directions, dot: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return variances; ``dot`` multiplies rows with rows, (N, K) and (M, K), to (N,) or (N, M)."""
    if not _is_thin(a, b):
        spread_a, spread_b = a.dense(), b.dense()
        outer_a, outer_b = (x.mean.unsqueeze(2) * x.mean.unsqueeze(1) for x in (a, b))
        turned = dot(spread_a.flatten(1), (spread_b + outer_b).flatten(1))
        return turned + dot(outer_a.flatten(1), spread_b.flatten(1))
    own_a, own_b = a.axis * a.tilt, b.axis * b.tilt
    # m_b^T C_a m_b and m_a^T C_b m_a
    out = dot(a.diagonal, b.mean**2) + 2 * dot(a.axis, b.mean) * dot(a.tilt, b.mean)
    out = out + dot(a.mean**2, b.diagonal) + 2 * dot(a.mean, b.axis) * dot(a.mean, b.tilt)
    # tr(C_a C_b)
    out = out + dot(a.diagonal, b.diagonal + 2 * own_b) + 2 * dot(own_a, b.diagonal)
    return out + 2 * dot(a.axis, b.tilt) * dot(a.tilt, b.axis) + 2 * dot(a.axis, b.axis) * dot(a.tilt, b.tilt)


@dataclass(frozen=True)
class Directions:
    """Mean and covariance of N directions, float64.

    The covariance is ``scale^2 V + axis tilt^T + tilt axis^T``, with the covariance ``V`` of the spread. The spread
    keeps its structure: only :meth:`dense` makes matrices.

    Attributes:
        mean: Means of the unit vectors, norm at most 1, shape (N, D).
        lost: ``1 - |mean|^2``, shape (N,); computed from a mean of nearly norm 1 it would round to zero.
        spread: Spread of the raw outputs, or of the unit vectors themselves.
        scale: Shape (N,).
        axis: Shape (N, D).
        tilt: Shape (N, D).
    """

    mean: Tensor
    lost: Tensor
    spread: Spread
    scale: Tensor
    axis: Tensor
    tilt: Tensor

    @classmethod
    def of(cls, mean: Tensor, lost: Tensor, spread: Spread | None = None) -> Directions:
        """Build directions with a known covariance (``None``: zero)."""
        nothing = torch.zeros_like(mean)
        return cls(
            mean, lost, DiagonalSpread(nothing) if spread is None else spread, torch.ones_like(lost), nothing, nothing
        )

    def __getitem__(self, rows: slice) -> Directions:
        """Return the directions of some of the rows."""
        return Directions(
            self.mean[rows], self.lost[rows], self.spread.rows(rows), self.scale[rows], self.axis[rows], self.tilt[rows]
        )

    @property
    def diagonal(self) -> Tensor:
        """``scale^2 V`` of a diagonal ``V``, shape (N, D)."""
        scale = self.scale.unsqueeze(1)
        return scale * self.spread.variance.double() * scale

    def dense(self) -> Tensor:
        """Return covariances, shape (N, D, D)."""
        scale = self.scale.view(-1, 1, 1)
        cross = self.axis.unsqueeze(2) * self.tilt.unsqueeze(1)
        return scale * self.spread.covariance.double() * scale + cross + cross.mT


def check_embeddings(name: str, value: object) -> Tensor:
    """Return the raw means (N, D), N >= 1, of a distribution or a tensor of embeddings; raise for anything else."""
    if not isinstance(value, (EmbeddingDistribution, Tensor)):
        wanted = "an EmbeddingDistribution, or a tensor of embeddings"
        raise InputTypeError(name, wanted, f"a {type(value).__name__}")
    mean = value if isinstance(value, Tensor) else value.raw_mean
    if mean.ndim != 2 or not len(mean):
        raise InputError(name, "embeddings (N, D), N >= 1", f"shape {tuple(mean.shape)}")
    return mean


def directions(name: str, embeddings: EmbeddingDistribution | Tensor) -> Directions:
    """Return mean and covariance of the directions of embeddings, in float64.

    In float32 the cosine of two nearly equal embeddings would lose its distance from one, and its variance.

    For a tensor: its normalised rows, without spread. For samples: mean and covariance of the normalised samples. For a
    Gaussian ``N(m, V)`` over raw outputs, with ``n = |m|``, ``u = m / n``, ``S = V / n^2`` and ``P = I - u u^T``::

        tau = tr(P S P)      rho = u^T S u       c = P S u       q = tr((P S P)^2)
        g = (3 rho tau + 6 |c|^2 - 3/2 q) / (1 + tau)^2
        R^2 = 1 / ((1 + tau) (1 + g))                            (1 - g in place of 1 / (1 + g) where g < 0)
        zeta = (q / 2 + rho tau^2) / ((1 + tau)^2 (1 + tau + rho))
        E[x] = R u - c (1 + tau + rho)^(-3/2)
        Cov[x] = (1 - R^2 - zeta) / tau P S P + zeta u u^T

    ``R`` is exact to the second power of the covariance, ``E[x]`` and ``Cov[x]`` to the first, and the variance along
    ``u`` to the second, which is its leading power. The trace of the covariance and the squared length of the mean add
    up to one, as for every unit vector, up to the second power of ``c``. The power contains ``rho``, so the mean stays
    inside the sphere even for a large spread.

    Source: derived for this library. The squared tangential length is replaced by its mean,
    ``|z|^2 = n^2 ((1 + r)^2 + tau)``, because it is nearly constant in high dimension. The expansion in the rest then
    converges for large ``tau`` too; for an isotropic Gaussian of infinite variance it gives the limits to order 1 / D.
    """
    if isinstance(embeddings, Tensor):
        point, _ = unit(name, validate.real(name, embeddings).double())
        return Directions.of(point, torch.zeros_like(point[:, 0]))
    spread = embeddings.spread
    if isinstance(spread, Samples):
        points = Samples(unit(name, spread.samples.double())[0])
        trace, _ = points.across(points.samples[:, 0])
        return Directions.of(points.samples.mean(1), trace * (1 - 1 / points.samples.shape[1]), points)
    u, norm = unit(name, embeddings.raw_mean.double())
    trace, size, pushed = spread.moments(u)
    # In this order neither the square of a norm nor a quotient by it can overflow. The limit counts where the direction
    # is nearly random.
    root = torch.minimum(1 / norm, (_MOST / trace.detach()).sqrt())
    scale = root.unsqueeze(1)
    pushed = scale * pushed * scale
    rho = (pushed * u).sum(1)
    tau = (root * trace * root - rho).clamp(min=0)
    bend = (pushed - rho.unsqueeze(1) * u).square().sum(1)
    # Clamped to its possible range, because the difference loses its digits if rho is far larger than tau.
    square = ((root * size * root).square() - 2 * bend - rho**2).clamp(tau**2 / (u.shape[1] - 1), tau**2)
    *lengths, lost = _scalars(tau, rho, bend, square)
    length, across, radial = (value.unsqueeze(1) for value in lengths)
    rho, whole = rho.unsqueeze(1), (1 + tau + rho).unsqueeze(1)
    mean = length * u - (pushed - rho * u) * whole**-1.5
    # P S P = S - u t^T - t u^T with t = S u - rho u / 2.
    tilt = radial / 2 * u - across * (pushed - rho / 2 * u)
    return Directions(mean, lost, spread, root * across.squeeze(1).sqrt(), u, tilt)


def _scalars(tau: Tensor, rho: Tensor, bend: Tensor, square: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``R``, ``(1 - R^2 - zeta) / tau``, ``zeta`` and ``1 - |E[x]|^2``, shape (N,) each."""
    tiny = torch.finfo(tau.dtype).tiny
    whole = 1 + tau
    # Divide by tau first, because 1 - R^2 loses its digits if tau is small.
    ratio = (3 * rho * tau + 6 * bend - 1.5 * square) / (tau + tiny) / whole**2
    g = ratio * tau
    kept = torch.where(g > 0, 1 / (1 + g.clamp(min=0)), 1 - g)
    shorter = torch.where(g > 0, ratio * kept, ratio)
    radial_by_tau = (square / (tau + tiny) / 2 + rho * tau) / whole**2 / (whole + rho)
    by_tau = (1 + shorter) / whole
    lost = (tau * by_tau - bend * (whole + rho) ** -3).clamp(min=0)
    return (kept / whole).sqrt(), (by_tau - radial_by_tau).clamp(min=0), radial_by_tau * tau, lost
