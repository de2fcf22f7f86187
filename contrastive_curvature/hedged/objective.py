"""The training objective of hedged embeddings: the variational information bottleneck for pairs."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from contrastive_curvature import validate
from contrastive_curvature.errors import InputTypeError, expected
from contrastive_curvature.hedged._checks import check_matches, check_mixture, reduced
from contrastive_curvature.hedged.divergence import kl_bound, kl_estimate
from contrastive_curvature.hedged.match import log_mean, pair_logits
from contrastive_curvature.hedged.sampling import stratified_samples

__all__ = ["match_loss", "vib_objective"]


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
    """Return the negative log-probability of what is so of each pair of uncertain embeddings.

    Args:
        samples1: Samples of the first embedding of each pair, shape (..., K1, D).
        samples2: Samples of the second, shape (..., K2, D), whose batch shape broadcasts.
        matches: Whether each pair matches, booleans that broadcast to the batch shape.
        a: Slope per unit of distance, > 0.
        b: Intercept.
        average: What is averaged over the pairs of samples. ``"log"``: the log-probability, as Eq. 8 prints and
            appendix E derives. ``"probability"``: the probability, whose log is then taken: Eq. 3 of Eq. 5. It is the
            smaller of the two (Jensen), and forgives samples that are far off as long as others are near.
        reduction: ``"mean"`` or ``"sum"`` over the pairs, or ``"none"``.

    Returns:
        The loss (in nats): a scalar, or the batch shape with ``"none"``. With one sample each, it is
        :func:`~contrastive_curvature.hedged.soft_contrastive_loss`, whatever ``average`` is.

    Raises:
        InputTypeError: An argument has a wrong type.
        InputError: A shape does not fit, the dimensions or devices differ, an entry is NaN or infinite, ``a`` is not
            positive, an option is unknown, or the mean over no pairs is asked for.

    Source: "Hedged instance embedding", first term of Eq. 8.
    """
    validate.choice("average", average, ("log", "probability"))
    logits = pair_logits(samples1, samples2, a, b)
    so = check_matches(matches, logits.shape[:-2], logits.device)
    if average == "probability":
        return reduced(-log_mean(logits, so), reduction)
    signed = torch.where(so[..., None, None], logits, -logits)
    return reduced(-logsigmoid(signed).mean((-2, -1)), reduction)


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
        second: The same of the second; its C may differ, its batch shape must broadcast.
        matches: Whether each pair matches, booleans that broadcast to the batch shape.
        a: Slope per unit of distance, > 0.
        b: Intercept.
        kl_weight: Weight beta of the divergences, >= 0. The document gives no value.
        n_samples: Samples of each embedding, a multiple of its C; all pairs of them are used.
        average: See :func:`match_loss`.
        divergence: ``"bound"``: :func:`~contrastive_curvature.hedged.kl_bound`, exact for C = 1. ``"sampled"``:
            :func:`~contrastive_curvature.hedged.kl_estimate`, unbiased for every C, with the noise of the samples.
        reduction: ``"mean"`` or ``"sum"`` over the pairs, or ``"none"``.
        generator: Random generator on the device of the embeddings; torch's default one if not given.

    Returns:
        The loss (in nats): a scalar, or the batch shape with ``"none"``.

    Raises:
        InputTypeError: An argument has a wrong type.
        InputError: A shape does not fit, the dimensions or devices differ, an entry is NaN or infinite, a variance or
            ``a`` is not positive, an option is unknown, ``n_samples`` is no multiple of C, or the mean over no pairs
            is asked for.

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
    return reduced(losses + kl_weight * both, reduction)


def _mixture(name: str, value: object) -> tuple[Tensor, Tensor]:
    if not isinstance(value, tuple) or len(value) != 2:
        received = f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
        raise InputTypeError(expected(name, "a tuple (mean, variance) of two tensors", received))
    return check_mixture(f"mean of {name}", value[0], f"variance of {name}", value[1])
