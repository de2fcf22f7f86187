"""The Bayesian triplet loss: negative log-probability of the triplets, plus divergences to the prior."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError
from contrastive_curvature.triplet.divergence import kl_to_normal_of, kl_to_uniform_of
from contrastive_curvature.triplet.gaussian_moments import (
    Directed,
    Gaussian,
    check_triplet,
    moments_of,
    moments_of_vmf,
    spread_of,
)
from contrastive_curvature.triplet.probability import log_probability_with
from contrastive_curvature.vmf.checks import check_dim, unit


def _on_sphere(name: str, embedding: Gaussian) -> tuple[Gaussian, Tensor]:
    """Return the embedding with a mean of norm 1, and its concentration ``1 / variance``."""
    mean, variance, dtype = embedding
    check_dim(mean.shape[-1])
    if variance.shape[-1] != 1:
        hint = 'distribution="vmf" has one concentration for all directions.'
        wanted = f"shape {(*mean.shape[:-1], 1)} (isotropic)"
        raise InputError(f"variance of {name}", wanted, tuple(variance.shape), hint)
    kappa = 1 / variance.squeeze(-1)
    infinite = int((~torch.isfinite(kappa)).sum())
    if infinite:
        hint = "The concentration 1 / variance would be infinite."
        raise InputError(f"variance of {name}", "variances > 0", f"{infinite} at or next to 0", hint)
    return Gaussian(unit(f"mean of {name}", mean)[0], variance, dtype), kappa


def bayesian_triplet_loss(
    anchor: tuple[Tensor, Tensor],
    positive: tuple[Tensor, Tensor],
    negative: tuple[Tensor, Tensor],
    margin: float = 0.0,
    *,
    distribution: Literal["gaussian", "vmf"] = "gaussian",
    moments: Literal["gaussian", "vmf"] | None = None,
    prior_variance: float | None = None,
    kl_weight: float = 1e-6,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Return the negative log-probability of triplets plus the weighted divergences of their embeddings to the prior.

    ``-log P(|a - p|^2 + margin < |a - n|^2) + kl_weight [KL(a) + KL(p) + KL(n)]`` per triplet; the first part
    approximates tau as normal, with the moments of :func:`~contrastive_curvature.triplet.tau_moments` or
    :func:`~contrastive_curvature.triplet.tau_moments_vmf`. The documents call this loss an evidence lower bound, but it
    is not; see ``docs/other_methods.md``.

    Args:
        anchor: Mean (..., D) and variance (..., D) (diagonal) or (..., 1) (isotropic), the latter > 0.
        positive: The same for the embedding that should be close.
        negative: The same for the embedding that should be far.
        margin: ``m >= 0``, in squared units of the embedding.
        distribution: ``"gaussian"``: prior ``N(0, prior_variance I)``. ``"vmf"``: the means are divided by their norm,
            the prior is uniform on the sphere, and the divergence is for a von Mises-Fisher distribution with
            ``kappa = 1 / variance``, D >= 2, isotropic variances only.
        moments: Moments of ``tau`` in the first part; ``None``: those of ``distribution``. With ``distribution="vmf"``,
            ``"gaussian"`` treats the embeddings as Gaussians around unit vectors, as the documents do.
        prior_variance: Variance of the Gaussian prior, > 0; ``None`` means 1. Refused with ``"vmf"``.
        kl_weight: Weight of the divergences, >= 0. The default is from the supplement's listing 1.
        reduction: ``"mean"`` or ``"sum"`` over the triplets, or ``"none"``.

    Returns:
        The loss (in nats): a scalar, or the broadcast batch shape with ``"none"``. Twice differentiable; with
            ``moments="vmf"`` twice in the means and once in the variances.

    Raises:
        InputError: An option has no effect, or there are no triplets for the mean.

    Source: Eq. 37 to 46 and listings 1 and 2 of the supplement of Warburg et al. (2021).
    """
    margin, kl_weight = validate.number("margin", margin), validate.number("kl_weight", kl_weight)
    validate.choice("distribution", distribution, ("gaussian", "vmf"))
    validate.choice("reduction", reduction, ("mean", "sum", "none"))
    if distribution == "vmf" and prior_variance is not None:
        hint = 'The uniform distribution on the sphere has no variance; leave it out, or use distribution="gaussian".'
        raise InputError("prior_variance", 'None with distribution="vmf"', prior_variance, hint)
    prior = 1.0 if prior_variance is None else validate.number("prior_variance", prior_variance, positive=True)
    validate.choice("moments", distribution if moments is None else moments, ("gaussian", "vmf"))
    if distribution == "gaussian" and moments == "vmf":
        hint = 'Only embeddings on the sphere have them: distribution="vmf".'
        raise InputError("moments", '"gaussian" with distribution="gaussian"', moments, hint)
    embeddings, dtype = check_triplet(anchor, positive, negative)
    named = zip(("anchor", "positive", "negative"), embeddings, strict=True)
    if distribution == "gaussian":
        divergences = [kl_to_normal_of(one, prior, f"variance of {name}") for name, one in named]
        of_tau = moments_of(*embeddings)
    else:
        a, p, n = (_on_sphere(name, one) for name, one in named)
        divergences = [kl_to_uniform_of(kappa, one.mean.shape[-1]) for one, kappa in (a, p, n)]
        if moments == "gaussian":
            of_tau = moments_of(a[0], p[0], n[0])
        else:
            directed = (Directed(one.mean, spread_of(kappa, one.mean.shape[-1])) for one, kappa in (a, p, n))
            of_tau = moments_of_vmf(*directed)
    losses = kl_weight * (divergences[0] + divergences[1] + divergences[2]) - log_probability_with(of_tau, margin)
    return reduced(losses, reduction, "anchor, positive, negative", "triplet").to(dtype)


def reduced(losses: Tensor, reduction: str, argument: str, what: str) -> Tensor:
    """Return the mean or the sum of the losses, or the losses themselves."""
    validate.choice("reduction", reduction, ("mean", "sum", "none"))
    if reduction == "none":
        return losses
    if reduction == "mean" and not losses.numel():
        raise InputError(argument, f"at least one {what}", "none", 'Or reduction="sum".')
    return losses.mean() if reduction == "mean" else losses.sum()
