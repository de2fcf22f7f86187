"""The expected likelihood of a non-isotropic proxy under a von Mises-Fisher embedding, by Monte Carlo: EL-nivMF.

Source: Kirchhof et al. (2022), A Non-isotropic Probabilistic Take on Proxy-based Deep Metric Learning, supplement,
Algorithm 1. It prints the likelihood of ``z``, the same for every sample; here it is that of the samples.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.vmf._checks import check_real
from contrastive_curvature.vmf._pairs import checked_directions
from contrastive_curvature.vmf.nonisotropic import all_pairs, checked_proxies
from contrastive_curvature.vmf.reparameterized import rsample

__all__ = ["el_nivmf_distance", "el_nivmf_logits"]


def _log_likelihoods(
    mu: Tensor,
    kappa: Tensor,
    proxy_mu: Tensor,
    proxy_kappa: Tensor,
    n_samples: int,
    generator: torch.Generator | None,
    normalized: bool,
) -> Tensor:
    """Return the log-likelihoods (n_samples, B, C) of samples of every embedding under every proxy."""
    u = checked_directions("mu", mu)
    p, k = checked_proxies(u, proxy_mu, proxy_kappa, normalized)
    rows = u.shape[0]
    shape = tuple(check_real("kappa", kappa).shape)
    if shape not in ((), (rows,)):
        raise InputError(expected("kappa", f"shape ({rows},), one for each row of mu, or ()", shape))
    dtype = torch.promote_types(torch.promote_types(u.dtype, p.dtype), k.dtype)
    samples = rsample(u.to(dtype), kappa, n_samples, generator)
    flat = samples.reshape(n_samples * rows, u.shape[1])
    return all_pairs(flat, p.to(dtype), k.to(dtype), normalized).reshape(n_samples, rows, p.shape[0])


def el_nivmf_distance(
    mu: Tensor,
    kappa: Tensor,
    proxy_mu: Tensor,
    proxy_kappa: Tensor,
    n_samples: int,
    generator: torch.Generator | None = None,
    *,
    normalized: bool = True,
) -> Tensor:
    """Return ``-log`` of the mean likelihood of every proxy over samples of every embedding, d_EL-nivMF.

    The mean is an unbiased estimate of the integral of the two densities' product; its logarithm is biased by half its
    relative variance, which falls with ``1 / n_samples``. Gradients reach all four tensors, through the samples too
    (``rsample``). The samples of an embedding are shared by all proxies.

    Args:
        mu: Directions of the embeddings, shape (B, D); normalised here.
        kappa: Concentrations of the embeddings, shape (B,) or (), finite and >= 0.
        proxy_mu: Directions of the proxies, shape (C, D); normalised here.
        proxy_kappa: Concentrations of the proxies' axes, shape (C, D), finite and > 0.
        n_samples: Samples of each embedding, >= 1; the document takes 5 to 20.
        generator: Random generator on the device of ``mu``; torch's default one if not given.
        normalized: As in ``nivmf_log_prob``; ``False`` is what the document trains with.

    Returns:
        Distances (in nats), of either sign, shape (B, C).

    Raises:
        InputTypeError: If a tensor is not of a floating-point dtype, ``n_samples`` is not an int, or ``normalized``
            not a bool.
        InputError: If a shape or device disagrees, a direction is zero or not finite, a concentration is negative (an
            axis': not positive) or not finite, or ``n_samples`` < 1.
    """
    log_likelihoods = _log_likelihoods(mu, kappa, proxy_mu, proxy_kappa, n_samples, generator, normalized)
    return math.log(n_samples) - torch.logsumexp(log_likelihoods, 0)


def el_nivmf_logits(
    mu: Tensor,
    kappa: Tensor,
    proxy_mu: Tensor,
    proxy_kappa: Tensor,
    temperature: Tensor,
    n_samples: int,
    generator: torch.Generator | None = None,
    *,
    normalized: bool = True,
) -> Tensor:
    """Return Algorithm 1's similarities to the proxies, whose cross-entropy with the labels is its loss.

    ``logsumexp over samples of (log-likelihood / temperature)``. At temperature 1 this is ``-el_nivmf_distance + log
    n_samples``. At another it is not ``-el_nivmf_distance / temperature``: the power stands inside the mean.

    Args:
        mu: Directions of the embeddings, shape (B, D); normalised here.
        kappa: Concentrations of the embeddings, shape (B,) or (), finite and >= 0.
        proxy_mu: Directions of the proxies, shape (C, D); normalised here.
        proxy_kappa: Concentrations of the proxies' axes, shape (C, D), finite and > 0.
        temperature: One number > 0, shape () or (1,); it may be learned.
        n_samples: Samples of each embedding, >= 1; the document takes 5 to 20.
        generator: Random generator on the device of ``mu``; torch's default one if not given.
        normalized: As in ``nivmf_log_prob``; ``False`` is what the document trains with.

    Returns:
        Logits, shape (B, C), with gradients to all five tensors.

    Raises:
        InputTypeError: If a tensor is not of a floating-point dtype, ``n_samples`` is not an int, or ``normalized``
            not a bool.
        InputError: As in ``el_nivmf_distance``, or if ``temperature`` is not one positive finite number.
    """
    t = check_real("temperature", temperature)
    if t.numel() != 1 or t.ndim > 1 or not bool(torch.isfinite(t).all() & (t > 0).all()):
        shown = float(t) if t.numel() == 1 else tuple(t.shape)
        raise InputError(expected("temperature", "one finite number > 0, shape () or (1,)", shown))
    log_likelihoods = _log_likelihoods(mu, kappa, proxy_mu, proxy_kappa, n_samples, generator, normalized)
    return torch.logsumexp(log_likelihoods / t, 0)
