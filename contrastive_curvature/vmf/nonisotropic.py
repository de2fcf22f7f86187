"""The non-isotropic von Mises-Fisher distribution: a concentration for every axis.

With ``K = diag(kappa)``, ``a = K mu / |K mu|`` and ``b = |K mu|``, the direction ``K x / |K x|`` has the von
Mises-Fisher distribution with direction ``a`` and concentration ``b``. The map ``x -> K x / |K x|`` is a bijection of
the sphere, which multiplies its surface by ``det K / |K x|^D``. So the density of x is

    C_D(b) exp(b <K x / |K x|, a>) det K / |K x|^D.

The document writes ``det K / |K mu|`` for the last factor and says itself that this is a heuristic: its function does
not integrate to 1 (for ``K = kappa I`` it integrates to ``kappa^(D-1)``). ``normalized=False`` selects this heuristic.

Source: Kirchhof et al. (2022), A Non-isotropic Probabilistic Take on Proxy-based Deep Metric Learning, supplement, Eq.
14-22; the surface factor is derived for this library.

The expected likelihood of such a proxy under a von Mises-Fisher embedding is computed by Monte Carlo (EL-nivMF,
Algorithm 1 there). Algorithm 1 prints the likelihood of ``z``, which is the same for every sample; this module uses the
likelihood of the samples.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError
from contrastive_curvature.vmf.checks import broadcast_batch, check_kappa, unit
from contrastive_curvature.vmf.density import log_density_at_mode
from contrastive_curvature.vmf.distances import checked_directions, common_dtype, row_kappas, versine
from contrastive_curvature.vmf.sampling import rsample


class _Terms(NamedTuple):
    """Terms that do not depend on x: K divided by its largest entry, a, b, and the log of the constant factors."""

    scaled: Tensor
    pole: Tensor
    length: Tensor
    log_factor: Tensor


def _axis_kappas(name: str, value: object) -> Tensor:
    checked = check_kappa(value, name)
    if bool((checked <= 0).any()):
        hint = "An axis without concentration makes the map of the sphere singular; use a small value."
        raise InputError(name, "> 0 for every axis", float(checked.min()), hint)
    return checked


def _terms(m: Tensor, kappa: Tensor, normalized: bool) -> _Terms:
    top = kappa.detach().amax(-1, keepdim=True)
    scaled = kappa / top
    pole, share = unit("kappa * mu", scaled * m)
    length = share * top.squeeze(-1)
    log_factor = log_density_at_mode(length, m.shape[-1])
    surface = scaled.log().sum(-1) if normalized else kappa.log().sum(-1) - length.log()
    return _Terms(scaled, pole, length, log_factor + surface)


def nivmf_log_prob(x: Tensor, mu: Tensor, kappa: Tensor, *, normalized: bool = True) -> Tensor:
    """Return the log-density of the non-isotropic von Mises-Fisher distribution in the surface measure of the sphere.

    The surface factor moves the mode from ``mu`` towards the axes of small concentration.

    Args:
        x: Directions, shape (..., D), D >= 2; normalised here.
        mu: Directions of the distributions, shape (..., D); normalised here.
        kappa: Concentrations of the axes, shape (..., D), finite and > 0.
        normalized: Whether to use the correct surface factor. ``False``: the document's ``det K / |K mu|`` (Eq. 19),
            which does not depend on x.

    Returns:
        Log-densities (in nats), with the broadcast batch shape.

    Source: Eq. 22.
    """
    validate.flag("normalized", normalized)
    u, _ = unit("x", x)
    m, _ = unit("mu", mu)
    k = _axis_kappas("kappa", kappa)
    if k.ndim < 1:
        raise InputError("kappa", "shape (..., D)", tuple(k.shape))
    dtype = common_dtype(x=u, mu=m, kappa=k)
    broadcast_batch(x=(u, 1), mu=(m, 1), kappa=(k, 1))
    terms = _terms(m.to(dtype), k.to(dtype), normalized)
    image, stretch = unit("kappa * x", terms.scaled * u.to(dtype))
    log_prob = terms.log_factor - terms.length / 2 * (image - terms.pole).square().sum(-1)
    return log_prob - u.shape[-1] * stretch.log() if normalized else log_prob


def _all_pairs(u: Tensor, m: Tensor, kappa: Tensor, normalized: bool) -> Tensor:
    """Return the log-densities of directions (M, D) under distributions (C, D), shape (M, C), for checked arguments."""
    terms = _terms(m, kappa, normalized)
    tiny = torch.finfo(u.dtype).tiny
    stretch = (u.square() @ terms.scaled.square().T).clamp(min=tiny).sqrt()
    cosine = (u @ (terms.scaled * terms.pole).T) / stretch
    log_prob = terms.log_factor - terms.length * versine(cosine)
    return log_prob - u.shape[-1] * stretch.log() if normalized else log_prob


def _checked(mu: object, proxy_mu: object, proxy_kappa: object, normalized: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return directions (B, D), and directions and concentrations of nivMF proxies (C, D), in one dtype."""
    validate.flag("normalized", normalized)
    u = checked_directions("mu", mu)
    p = checked_directions("proxy_mu", proxy_mu)
    k = _axis_kappas("proxy_kappa", proxy_kappa)
    if k.shape != p.shape:
        hint = f"To use one concentration for all axes, call .expand({tuple(p.shape)}) on a column."
        raise InputError("proxy_kappa", f"shape {tuple(p.shape)}, that of proxy_mu", tuple(k.shape), hint)
    dtype = common_dtype(mu=u, proxy_mu=p, proxy_kappa=k)
    return u.to(dtype), p.to(dtype), k.to(dtype)


def nivmf_distance(mu: Tensor, proxy_mu: Tensor, proxy_kappa: Tensor, *, normalized: bool = True) -> Tensor:
    """Return minus the log-density of every embedding's direction under every proxy's distribution, d_nivMF.

    Args:
        mu: Directions of the embeddings, shape (B, D); normalised here.
        proxy_mu: Directions of the proxies, shape (C, D); normalised here.
        proxy_kappa: Concentrations of the proxies' axes, shape (C, D), finite and > 0.
        normalized: As in ``nivmf_log_prob``; the document trains with ``False``.

    Returns:
        Distances (in nats), of either sign, shape (B, C). Rounding: about eps times the largest ``|K mu|``.

    Source: Eq. 22.
    """
    return -_all_pairs(*_checked(mu, proxy_mu, proxy_kappa, normalized), normalized)


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
    u, p, k = _checked(mu, proxy_mu, proxy_kappa, normalized)
    samples = rsample(u, row_kappas("kappa", kappa, u), n_samples, generator)
    return _all_pairs(samples.flatten(0, 1), p, k, normalized).unflatten(0, samples.shape[:2])


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
    """Return ``-log`` of every proxy's mean likelihood over samples of every embedding, d_EL-nivMF.

    The mean is an unbiased estimate of the integral over the product of both densities; the logarithm is biased by half
    the relative variance of the mean. Gradients reach all four tensors, also through the samples (``rsample``).

    Args:
        mu: Directions of the embeddings, shape (B, D); normalised here.
        kappa: Concentrations of the embeddings, shape (B,) or (), finite and >= 0.
        proxy_mu: Directions of the proxies, shape (C, D); normalised here.
        proxy_kappa: Concentrations of the proxies' axes, shape (C, D), finite and > 0.
        n_samples: Samples of each embedding, >= 1; the document uses 5 to 20.
        generator: Random generator on the device of ``mu``; torch's default one if not given.
        normalized: As in ``nivmf_log_prob``; the document trains with ``False``.

    Returns:
        Distances (in nats), of either sign, shape (B, C).
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
    """Return the similarities to the proxies of Algorithm 1; its loss is their cross-entropy with the labels.

    They are ``logsumexp over samples of (log-likelihood / temperature)``. At temperature 1 this is ``-el_nivmf_distance
    + log n_samples``. At other temperatures it is not ``-el_nivmf_distance / temperature``, because the power is inside
    the mean.

    Args:
        mu: Directions of the embeddings, shape (B, D); normalised here.
        kappa: Concentrations of the embeddings, shape (B,) or (), finite and >= 0.
        proxy_mu: Directions of the proxies, shape (C, D); normalised here.
        proxy_kappa: Concentrations of the proxies' axes, shape (C, D), finite and > 0.
        temperature: One number > 0, shape () or (1,); it may be learned.
        n_samples: Samples of each embedding, >= 1; the document uses 5 to 20.
        generator: Random generator on the device of ``mu``; torch's default one if not given.
        normalized: As in ``nivmf_log_prob``; the document trains with ``False``.

    Returns:
        Logits, shape (B, C), with gradients to all five tensors.
    """
    t = validate.real("temperature", temperature)
    if t.numel() != 1 or t.ndim > 1 or not bool((t > 0).all()):
        shown = float(t) if t.numel() == 1 else tuple(t.shape)
        raise InputError("temperature", "one finite number > 0, shape () or (1,)", shown)
    log_likelihoods = _log_likelihoods(mu, kappa, proxy_mu, proxy_kappa, n_samples, generator, normalized)
    return torch.logsumexp(log_likelihoods / t, 0)
