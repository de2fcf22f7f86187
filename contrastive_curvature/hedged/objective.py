"""Losses of pairs: for points with a soft or a hard threshold, and for uncertain embeddings with divergences."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.hedged.matching import (
    check_mixture,
    check_points,
    match_logits,
    pair_logits,
    stratified_samples,
)
from contrastive_curvature.triplet.divergence import excess
from contrastive_curvature.triplet.gaussian_moments import check_pair
from contrastive_curvature.triplet.loss import reduced
from contrastive_curvature.vmf.checks import broadcast_batch, same_dim


def soft_contrastive_loss(
    z1: Tensor,
    z2: Tensor,
    matches: Tensor,
    a: float | Tensor,
    b: float | Tensor,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Return the negative log-probability of the true state of each pair of points: match or mismatch.

    With ``p = sigmoid(-a |z1 - z2| + b)``: ``-log p`` for a match, ``-log(1 - p)`` for a mismatch.

    Args:
        z1: Points, shape (..., D).
        z2: Points, shape (..., D), whose batch shape broadcasts.
        matches: Whether each pair matches, booleans that broadcast to the batch shape.
        a: Slope per unit of distance, > 0.
        b: Intercept.
        reduction: ``"mean"`` or ``"sum"`` over the pairs, or ``"none"``.

    Returns:
        The loss (in nats): a scalar, or the batch shape with ``"none"``.

    Source: "Hedged instance embedding", Eq. 2 and 3 (with the sign of
    :func:`~contrastive_curvature.hedged.match_logits`).
    """
    logits = match_logits(z1, z2, a, b)
    so = _check_matches(matches, logits.shape)
    return reduced(-logsigmoid(torch.where(so, logits, -logits)), reduction, "pairs", "pair")


def hard_contrastive_loss(
    z1: Tensor,
    z2: Tensor,
    matches: Tensor,
    margin: float = 1.0,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Return the contrastive loss with a hard margin, for points that need not be on the sphere.

    It is ``|z1 - z2|^2`` for a match and ``max(margin - |z1 - z2|, 0)^2`` for a mismatch;
    :class:`~contrastive_curvature.losses.ContrastiveLoss` has another term for a mismatch.

    Args:
        z1: Points, shape (..., D).
        z2: Points, shape (..., D), whose batch shape broadcasts.
        matches: Whether each pair matches, booleans that broadcast to the batch shape.
        margin: Distance from which a mismatch has zero loss, > 0.
        reduction: ``"mean"`` or ``"sum"`` over the pairs, or ``"none"``.

    Returns:
        The loss (in squared units of the embedding): a scalar, or the batch shape with ``"none"``. The gradient of a
        mismatch at distance 0 is 0.

    Source: "Hedged instance embedding", Eq. 1 (Hadsell et al. 2006).
    """
    margin = validate.number("margin", margin, positive=True)
    first, second = check_points("z1", z1), check_points("z2", z2)
    same_dim(z1=first, z2=second)
    broadcast_batch(z1=(first, 1), z2=(second, 1))
    between = first - second
    so = _check_matches(matches, between.shape[:-1])
    far = (margin - torch.linalg.vector_norm(between, dim=-1)).clamp(min=0)
    return reduced(torch.where(so, between.square().sum(-1), far.square()), reduction, "pairs", "pair")


def kl_bound(mean: Tensor, variance: Tensor) -> Tensor:
    """Return the components' mean divergence to ``N(0, I)``: exact for a Gaussian, an upper bound for a mixture.

    It is ``1/(2 C) sum_c sum_d [variance - 1 - log(variance) + mean^2]``: exact for C = 1, at most ``log C`` too large.

    Args:
        mean: Means of the C components, shape (..., C, D).
        variance: Variances > 0 of the same shape. The components have equal weights.

    Returns:
        Nats, shape (...).

    Source: "Hedged instance embedding", Eq. 7 and 8, which do not say how the divergence of a mixture is computed.
    """
    centre, spread = check_mixture("mean", mean, "variance", variance)
    return (excess(spread) + centre.square()).sum(-1).mean(-1) / 2


def kl_estimate(samples: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return the Monte Carlo estimate of the divergence of a mixture to ``N(0, I)``.

    It is the mean of ``log p(z) - log N(z; 0, I)`` over samples of the mixture ``p``. It is unbiased; an estimate can
    be negative. Gradients flow through the samples and through ``p``.

    Args:
        samples: Samples of the mixture, equally many from each component, shape (..., K, D), from
            :func:`~contrastive_curvature.hedged.stratified_samples`.
        mean: Means of the C components, shape (..., C, D).
        variance: Variances > 0 of the same shape. The components have equal weights.

    Returns:
        Nats, shape (...).

    Source: "Hedged instance embedding", Eq. 22: the divergence as a mean over the embedding.
    """
    centre, spread = check_mixture("mean", mean, "variance", variance)
    drawn = check_points("samples", samples, samples=True)
    same_dim(samples=drawn, mean=centre)
    broadcast_batch(samples=(drawn, 2), mean=(centre, 2))
    centre, spread = centre.unsqueeze(-3), spread.unsqueeze(-3)  # (..., 1, C, D), to broadcast with (..., K, 1, D)
    exponents = ((drawn.unsqueeze(-2) - centre).square() / spread + torch.log(spread)).sum(-1) / -2
    log_mixture = torch.logsumexp(exponents, -1) - math.log(centre.shape[-2])
    # The factor (2 pi)^(-D/2) is in both densities.
    return (log_mixture + drawn.square().sum(-1) / 2).mean(-1)


def match_loss(
    samples1: Tensor,
    samples2: Tensor,
    matches: Tensor,
    a: float | Tensor,
    b: float | Tensor,
    *,
    average: Literal["log", "probability"] = "log",
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Return the negative log-probability of the true state of each pair of uncertain embeddings: match or mismatch.

    Args:
        samples1: Samples of the first embedding of each pair, shape (..., K1, D).
        samples2: Samples of the second embedding, shape (..., K2, D), whose batch shape broadcasts.
        matches: Whether each pair matches, booleans that broadcast to the batch shape.
        a: Slope per unit of distance, > 0.
        b: Intercept.
        average: Quantity to average over the pairs of samples. ``"log"``: the log-probability, as in Eq. 8.
            ``"probability"``: the probability, before the log (Eq. 5 inserted in Eq. 3); this loss is smaller.
        reduction: ``"mean"`` or ``"sum"`` over the pairs, or ``"none"``.

    Returns:
        The loss (in nats): a scalar, or the batch shape with ``"none"``. With one sample each, it is
        :func:`~contrastive_curvature.hedged.soft_contrastive_loss`.

    Source: "Hedged instance embedding", first term of Eq. 8.
    """
    validate.choice("average", average, ("log", "probability"))
    logits = pair_logits(samples1, samples2, a, b)
    so = _check_matches(matches, logits.shape[:-2])
    log_probabilities = logsigmoid(torch.where(so[..., None, None], logits, -logits))
    if average == "log":
        return reduced(-log_probabilities.mean((-2, -1)), reduction, "pairs", "pair")
    # logsumexp, because the mean of the probabilities may underflow.
    pairs = logits.shape[-1] * logits.shape[-2]
    return reduced(math.log(pairs) - torch.logsumexp(log_probabilities, (-2, -1)), reduction, "pairs", "pair")


def vib_objective(
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor],
    matches: Tensor,
    a: float | Tensor,
    b: float | Tensor,
    *,
    kl_weight: float,
    n_samples: int = 8,
    average: Literal["log", "probability"] = "log",
    divergence: Literal["bound", "sampled"] = "bound",
    reduction: Literal["mean", "sum", "none"] = "mean",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the match loss of pairs of uncertain embeddings plus their weighted divergences to ``N(0, I)``.

    Args:
        first: Mean and variance of the first embedding of each pair, both (..., C, D): mixtures of C Gaussians with
            diagonal covariances and equal weights. C = 1 is a single Gaussian.
        second: The same for the second embedding; its C may differ, its batch shape must broadcast.
        matches: Whether each pair matches, booleans that broadcast to the batch shape.
        a: Slope per unit of distance, > 0.
        b: Intercept.
        kl_weight: Weight beta of the divergences, >= 0. The document states no value.
        n_samples: Samples of each embedding, a multiple of its C; all pairs of them are used.
        average: See :func:`match_loss`.
        divergence: ``"bound"``: :func:`~contrastive_curvature.hedged.kl_bound`, exact for C = 1. ``"sampled"``:
            :func:`~contrastive_curvature.hedged.kl_estimate`, unbiased for every C, with the noise of the samples.
        reduction: ``"mean"`` or ``"sum"`` over the pairs, or ``"none"``.
        generator: Random generator on the device of the embeddings; torch's default one if not given.

    Returns:
        The loss (in nats): a scalar, or the batch shape with ``"none"``.

    Source: "Hedged instance embedding", Eq. 8.
    """
    kl_weight = validate.number("kl_weight", kl_weight)
    validate.choice("divergence", divergence, ("bound", "sampled"))
    mean1, variance1 = _mixture("first", first)
    mean2, variance2 = _mixture("second", second)
    samples1 = stratified_samples(mean1, variance1, n_samples, generator)
    samples2 = stratified_samples(mean2, variance2, n_samples, generator)
    losses = match_loss(samples1, samples2, matches, a, b, average=average, reduction="none")
    if divergence == "bound":
        both = kl_bound(mean1, variance1) + kl_bound(mean2, variance2)
    else:
        both = kl_estimate(samples1, mean1, variance1) + kl_estimate(samples2, mean2, variance2)
    return reduced(losses + kl_weight * both, reduction, "pairs", "pair")


def _mixture(name: str, value: object) -> tuple[Tensor, Tensor]:
    mean, variance = check_pair(name, value)
    return check_mixture(f"mean of {name}", mean, f"variance of {name}", variance)


def _check_matches(matches: object, batch: torch.Size) -> Tensor:
    """Return the indicator of matching pairs, expanded to the shape ``batch`` of the pairs."""
    if not isinstance(matches, Tensor) or matches.dtype != torch.bool:
        got = str(matches.dtype) if isinstance(matches, Tensor) else f"a {type(matches).__name__}"
        raise InputTypeError("matches", "a tensor of booleans", got, "Compare labels: labels1 == labels2.")
    try:
        fits = torch.broadcast_shapes(matches.shape, batch) == batch
    except RuntimeError:
        fits = False
    if not fits:
        raise InputError("matches", f"a shape that broadcasts to {tuple(batch)}", tuple(matches.shape))
    return matches.expand(batch)
