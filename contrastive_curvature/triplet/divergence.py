"""Kullback-Leibler divergence of a Gaussian embedding to a Gaussian prior."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.triplet._checks import Gaussian, check_gaussian

__all__ = ["excess", "kl_to_normal", "kl_to_normal_of"]

_SERIES_TERMS = 16  # with |x| <= 1/2 below, t^2 <= 1/9: the first term left out is below 1e-16 of the sum


def excess(ratio: Tensor) -> Tensor:
    """Return ``r - 1 - log r``, also for r close to 1, where both parts cancel."""
    x = ratio - 1
    t = x / (ratio + 1)
    series = torch.zeros_like(t)
    for k in range(_SERIES_TERMS, 0, -1):  # log r = 2 (t + t^3/3 + t^5/5 + ...), and x - 2 t = x t
        series = series * t.square() + 1 / (2 * k + 1)
    near = x * t - 2 * t**3 * series
    return torch.where(x.abs() <= 0.5, near, x - torch.log(ratio))


def kl_to_normal_of(embedding: Gaussian, prior_variance: float, name: str = "variance") -> Tensor:
    """Return the divergence for a checked embedding, in float64.

    Raises:
        InputError: A variance is zero.
    """
    mean, variance, _ = embedding
    zeros = int((variance == 0).sum())
    if zeros:
        raise InputError(expected(name, "variances > 0", f"{zeros} zeros", "The divergence would be infinite."))
    return (excess(variance / prior_variance) + mean.square() / prior_variance).sum(-1) / 2


def kl_to_normal(mean: Tensor, variance: Tensor, prior_variance: float = 1.0) -> Tensor:
    """Return the Kullback-Leibler divergence of ``N(mean, diag(variance))`` to the prior ``N(0, prior_variance I)``.

    ``1/2 sum_d [r_d - 1 - log r_d + mean_d^2 / prior_variance]`` with ``r_d = variance_d / prior_variance``. For a
    prior around another point, subtract that point from ``mean``.

    Args:
        mean: Means, shape (..., D).
        variance: Variances > 0, shape (..., D) (diagonal) or (..., 1) (isotropic: counts in all D dimensions).
        prior_variance: Variance of the prior in each dimension, > 0.

    Returns:
        Divergences >= 0 (in nats), shape (...).

    Raises:
        InputTypeError: An argument has a wrong type.
        InputError: A shape does not fit, an entry is NaN or infinite, or a variance is not positive.

    Source: Eq. 46 and listing 2 (lines 29 to 31) of the supplement of Warburg et al. (2021), whose lines 26 and 30
    count and sum over the batch instead of the dimensions.
    """
    prior_variance = validate.number("prior_variance", prior_variance, positive=True)
    embedding = check_gaussian("mean", mean, "variance", variance)
    return kl_to_normal_of(embedding, prior_variance).to(embedding.dtype)
