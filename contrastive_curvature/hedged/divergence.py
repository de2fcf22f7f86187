"""Kullback-Leibler divergence of a mixture of Gaussians to the standard normal distribution."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.hedged._checks import check_mixture, check_points
from contrastive_curvature.triplet.divergence import excess
from contrastive_curvature.vmf._checks import broadcast_batch

__all__ = ["kl_bound", "kl_estimate"]


def kl_bound(mean: Tensor, variance: Tensor) -> Tensor:
    """Return the mean of the components' divergences to ``N(0, I)``: that of a Gaussian, a bound on that of a mixture.

    ``1/(2 C) sum_c sum_d [variance - 1 - log(variance) + mean^2]``. The divergence of a mixture has no closed form.
    It is convex in its first argument, so this is an upper bound, exact for C = 1; it is too large by at most
    ``log C``.

    Args:
        mean: Means of the C components, shape (..., C, D).
        variance: Variances > 0 of the same shape. The components weigh the same.

    Returns:
        Nats, shape (...).

    Raises:
        InputTypeError: An argument is not a floating-point tensor.
        InputError: A shape does not fit, the devices differ, an entry is NaN or infinite, or a variance is not
            positive.

    Source: "Hedged instance embedding", Eq. 7 and 8, which do not say how the divergence of a mixture is computed. Its
    appendix E bounds the objective from below; an upper bound on the divergence keeps that bound one.
    """
    centre, spread = check_mixture("mean", mean, "variance", variance)
    return (excess(spread) + centre.square()).sum(-1).mean(-1) / 2


def kl_estimate(samples: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return the Monte Carlo estimate of the divergence of a mixture to ``N(0, I)``.

    The mean of ``log p(z) - log N(z; 0, I)`` over samples of the mixture, with ``p`` the mean of the components'
    densities. Unbiased; negative estimates occur. Gradients flow through the samples and through ``p``.

    Args:
        samples: Samples of the mixture, as many of each component, shape (..., K, D): those of
            :func:`~contrastive_curvature.hedged.stratified_samples`.
        mean: Means of the C components, shape (..., C, D).
        variance: Variances > 0 of the same shape. The components weigh the same.

    Returns:
        Nats, shape (...).

    Raises:
        InputTypeError: An argument is not a floating-point tensor.
        InputError: A shape does not fit, the dimensions or devices differ, an entry is NaN or infinite, or a variance
            is not positive.

    Source: "Hedged instance embedding", Eq. 22: the divergence as a mean over the embedding.
    """
    centre, spread = check_mixture("mean", mean, "variance", variance)
    drawn = check_points("samples", samples, samples=True)
    if drawn.shape[-1] != centre.shape[-1]:
        raise InputError(expected("samples", f"dimension {centre.shape[-1]}, that of mean", drawn.shape[-1]))
    broadcast_batch(samples=(drawn, 2), mean=(centre, 2))
    centre, spread = centre.unsqueeze(-3), spread.unsqueeze(-3)  # (..., 1, C, D) beside the samples' (..., K, 1, D)
    exponents = ((drawn.unsqueeze(-2) - centre).square() / spread + torch.log(spread)).sum(-1) / -2
    log_mixture = torch.logsumexp(exponents, -1) - math.log(centre.shape[-2])
    # The factor (2 pi)^(-D/2) is in both densities.
    return (log_mixture + drawn.square().sum(-1) / 2).mean(-1)
