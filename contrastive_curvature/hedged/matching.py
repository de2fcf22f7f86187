"""Samples of uncertain embeddings, and the probability of a match: a logistic function of their distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError
from contrastive_curvature.vmf.checks import broadcast_batch, same_dim


def stratified_samples(
    mean: Tensor, variance: Tensor, n_samples: int = 8, generator: torch.Generator | None = None
) -> Tensor:
    """Draw samples of mixtures of Gaussians, equally many from each component.

    A sample is ``mean + sqrt(variance) * noise``, so gradients flow to both. Means over the samples are unbiased, and
    their variance is at most the variance with independent samples.

    Args:
        mean: Means of the C components, shape (..., C, D); C = 1 is a single Gaussian.
        variance: Variances > 0 of the same shape: the covariances are diagonal.
        n_samples: Samples K of each mixture, a multiple of C. The default is from the document.
        generator: Random generator on the device of ``mean``; torch's default one if not given.

    Returns:
        Shape (..., K, D): the K / C samples of the first component, then those of the next, and so on.

    Source: "Hedged instance embedding", section 2.2. Its K = 8 is interpreted as samples per image, not per component.
    """
    centre, spread = check_mixture("mean", mean, "variance", variance)
    validate.count("n_samples", n_samples)
    components = centre.shape[-2]
    if n_samples % components:
        raise InputError("n_samples", f"a multiple of the {components} components", n_samples)
    validate.generator(generator, centre.device)
    centre, spread = (t.repeat_interleave(n_samples // components, -2) for t in (centre, spread))
    dtype = torch.promote_types(centre.dtype, spread.dtype)
    noise = torch.randn(centre.shape, dtype=dtype, device=centre.device, generator=generator)
    return centre + spread.sqrt() * noise


def inverse_softplus(value: float) -> float:
    """Return ``log(exp(value) - 1)`` of a positive number, in a form that does not overflow."""
    return value + math.log(-math.expm1(-value))


class MatchParameters(nn.Module):
    """The two learned numbers of the match probability: ``a = softplus(raw_a) > 0``, and ``b``.

    Calling it returns the tensors ``(a, b)``, through which gradients flow.

    Args:
        a: Initial value of the slope, > 0.
        b: Initial value of the intercept, any finite number. At distance ``b / a`` a match has probability 1/2.

    Raises:
        InputError: ``a`` or ``b`` is not finite, or ``a`` is not positive, in torch's default dtype.

    Source: "Hedged instance embedding", Eq. 2, which requires ``a > 0`` but does not say how, and has no initial
    values.
    """

    def __init__(self, a: float = 1.0, b: float = 0.0) -> None:
        super().__init__()
        _check_slope(a, b)
        self.raw_a = nn.Parameter(torch.tensor(inverse_softplus(a), device=torch.get_default_device()))
        self.b = nn.Parameter(torch.tensor(float(b), device=torch.get_default_device()))
        # Check again, because the parameters have the default dtype, which may be too narrow for the numbers.
        _check_slope(*self())

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return ``(a, b)``."""
        return softplus(self.raw_a), self.b


def match_logits(z1: Tensor, z2: Tensor, a: float | Tensor, b: float | Tensor) -> Tensor:
    """Return the logit of the match probability of points, ``-a |z1 - z2| + b``.

    Args:
        z1: Points, shape (..., D).
        z2: Points, shape (..., D), whose batch shape broadcasts.
        a: Slope per unit of distance, > 0.
        b: Intercept.

    Returns:
        Logits with the broadcast batch shape. The gradient at distance 0 is 0.

    Source: "Hedged instance embedding", Eq. 2, which prints ``a |z1 - z2| + b``; with ``a > 0`` that probability of a
    match would grow with the distance.
    """
    _check_slope(a, b)
    first, second = check_points("z1", z1), check_points("z2", z2)
    same_dim(z1=first, z2=second)
    broadcast_batch(z1=(first, 1), z2=(second, 1))
    return b - a * torch.linalg.vector_norm(first - second, dim=-1)


def pair_logits(samples1: Tensor, samples2: Tensor, a: float | Tensor, b: float | Tensor) -> Tensor:
    """Return the logits (..., K1, K2) of all pairs of samples (..., K1, D) and (..., K2, D) of two embeddings."""
    _check_slope(a, b)
    first, second = check_points("samples1", samples1, samples=True), check_points("samples2", samples2, samples=True)
    same_dim(samples1=first, samples2=second)
    broadcast_batch(samples1=(first, 2), samples2=(second, 2))
    # torch.cdist computes |x|^2 + |y|^2 - 2 x y for many samples, which cancels for close samples.
    return b - a * torch.linalg.vector_norm(first.unsqueeze(-2) - second.unsqueeze(-3), dim=-1)


def match_probability(samples1: Tensor, samples2: Tensor, a: float | Tensor, b: float | Tensor) -> Tensor:
    """Return the Monte Carlo estimate of the probability that two uncertain embeddings match.

    It is the mean of ``sigmoid(-a |z1 - z2| + b)`` over all ``K1 * K2`` pairs of samples, unbiased if the two sets are
    independent. For an embedding and itself use :func:`~contrastive_curvature.hedged.self_mismatch`, which draws two
    sets.

    Args:
        samples1: Samples of the first embedding, shape (..., K1, D); a point is one sample.
        samples2: Samples of the second embedding, shape (..., K2, D), whose batch shape broadcasts.
        a: Slope per unit of distance, > 0.
        b: Intercept.

    Returns:
        Probabilities with the broadcast batch shape; a pair takes ``K1 * K2 * D`` numbers of memory.

    Source: "Hedged instance embedding", Eq. 2, 4 and 5 (with the sign of :func:`match_logits`).
    """
    return torch.sigmoid(pair_logits(samples1, samples2, a, b)).mean((-2, -1))


def self_mismatch(
    mean: Tensor,
    variance: Tensor,
    a: float | Tensor,
    b: float | Tensor,
    *,
    n_samples: int = 8,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the probability that two independent draws of one embedding do not match.

    It is the mean of ``1 - sigmoid(-a |z - z'| + b)`` over all pairs of two independent sets of samples.

    Args:
        mean: Means of the C components, shape (..., C, D); C = 1 is a single Gaussian.
        variance: Variances > 0 of the same shape.
        a: Slope per unit of distance, > 0.
        b: Intercept.
        n_samples: Samples in each of the two sets, a multiple of C.
        generator: Random generator on the device of ``mean``; torch's default one if not given.

    Returns:
        Shape (...), between ``sigmoid(-b)`` (for a point) and 1.

    Source: "Hedged instance embedding", Eq. 9 and 5.
    """
    draws = [stratified_samples(mean, variance, n_samples, generator) for _ in range(2)]
    return torch.sigmoid(-pair_logits(draws[0], draws[1], a, b)).mean((-2, -1))


def _check_slope(a: object, b: object) -> None:
    """Refuse parameters of the match probability that are not finite numbers, and a slope that is not positive."""
    slope, intercept = (v.item() if isinstance(v, Tensor) and not v.ndim else v for v in (a, b))
    validate.number("a", slope, positive=True)
    validate.number("b", intercept, signed=True)


def check_points(name: str, value: object, *, samples: bool = False) -> Tensor:
    """Return finite points (..., D), or samples (..., K, D); half precision becomes float32."""
    points = validate.real(name, value)
    if points.ndim < 1 + samples or points.shape[-1] < 1 or (samples and points.shape[-2] < 1):
        wanted = "shape (..., K, D) with K >= 1 and D >= 1" if samples else "shape (..., D) with D >= 1"
        raise InputError(name, wanted, tuple(points.shape))
    return points


def check_mixture(mean_name: str, mean: object, variance_name: str, variance: object) -> tuple[Tensor, Tensor]:
    """Return means and variances > 0 of a mixture, both (..., C, D); half precision becomes float32."""
    centre, spread = validate.real(mean_name, mean), validate.real(variance_name, variance)
    if centre.ndim < 2 or min(centre.shape[-2:]) < 1:
        hint = "A single Gaussian is a mixture of one component: mean.unsqueeze(-2)."
        raise InputError(mean_name, "shape (..., C, D) with C >= 1 and D >= 1", tuple(centre.shape), hint)
    if spread.shape != centre.shape:
        raise InputError(variance_name, f"shape {tuple(centre.shape)}", tuple(spread.shape))
    if bool((spread <= 0).any()):
        hint = "A network's output becomes a variance by torch.nn.functional.softplus or torch.exp."
        raise InputError(variance_name, "variances > 0", float(spread.min()), hint)
    return centre, spread
