"""Distances of von Mises-Fisher distributions, between all embeddings and all proxies, in closed form.

An embedding z represents the distribution with direction ``z/|z|`` and concentration ``|z|`` (``from_embedding``); a
proxy represents a distribution with its own direction and concentration. Shape letters: ``B`` embeddings, ``C``
proxies, ``D`` dimensions. The work is a (B, D) by (D, C) matrix product in the dtype of the directions, and functions
of (B, C) numbers in float64; no (B, C, D) tensor is formed. Cosines have the rounding error eps of their dtype, so a
distance that grows with kappa has an error of about ``eps * kappa``.

Source: Kirchhof et al. (2022), A Non-isotropic Probabilistic Take on Proxy-based Deep Metric Learning, supplement.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError
from contrastive_curvature.vmf.checks import check_kappa, same_dim, unit
from contrastive_curvature.vmf.density import log_surface, of_kappa


class _Pairs(NamedTuple):
    """Inputs of the distances of B embeddings to C proxies.

    Attributes:
        versine: One minus the cosine, shape (B, C), float64.
        kappa: Concentrations of the embeddings, shape (B, 1), float64.
        proxy_kappa: Concentrations of the proxies, shape (1, C), float64.
        dim: The dimension D.
        dtype: The dtype of the result.
    """

    versine: Tensor
    kappa: Tensor
    proxy_kappa: Tensor
    dim: int
    dtype: torch.dtype


def checked_directions(name: str, value: object) -> Tensor:
    """Return the unit vectors of a matrix of directions, shape (rows, D)."""
    directions, _ = unit(name, value)
    if directions.ndim != 2:
        raise InputError(name, "shape (rows, D)", tuple(directions.shape))
    return directions


def common_dtype(**tensors: Tensor) -> torch.dtype:
    """Return the common dtype of tensors whose last axis is the dimension D."""
    same_dim(**tensors)
    return functools.reduce(torch.promote_types, (t.dtype for t in tensors.values()))


def versine(cosine: Tensor) -> Tensor:
    """Return ``1 - cosine`` in [0, 2]."""
    value = 1 - cosine
    # Only the value is clamped, not the gradient: a cosine that rounds above 1 belongs to two close directions, whose
    # gradient is small but not zero.
    return value + (value.clamp(0.0, 2.0) - value).detach()


def row_kappas(name: str, value: object, directions: Tensor) -> Tensor:
    """Return the concentrations of directions (rows, D): shape (rows,), or () for one common concentration."""
    checked = check_kappa(value, name)
    rows = directions.shape[0]
    if tuple(checked.shape) not in ((), (rows,)):
        wanted = f"shape ({rows},), one for each row of directions, or ()"
        raise InputError(name, wanted, tuple(checked.shape))
    return checked


def _pairs(mu: object, kappa: object, proxy_mu: object, proxy_kappa: object) -> _Pairs:
    """Check the arguments of a distance and pair every embedding with every proxy, by one matrix product."""
    u, p = checked_directions("mu", mu), checked_directions("proxy_mu", proxy_mu)
    dtype = common_dtype(mu=u, proxy_mu=p)
    k, other = row_kappas("kappa", kappa, u), row_kappas("proxy_kappa", proxy_kappa, p)
    apart = versine((u.to(dtype) @ p.to(dtype).T).double())
    dtype = torch.promote_types(torch.promote_types(dtype, k.dtype), other.dtype)
    column, row = k.double().expand(u.shape[0])[:, None], other.double().expand(p.shape[0])[None]
    return _Pairs(apart, column, row, u.shape[1], dtype)


def from_embedding(z: Tensor) -> tuple[Tensor, Tensor]:
    """Split embeddings into the direction and the concentration of the distribution that they represent.

    Args:
        z: Embeddings, shape (..., D), D >= 2, none zero.

    Returns:
        Directions (..., D) of norm 1, and concentrations (...), the norms. Gradients flow through both.
    """
    return unit("z", z)


def cosine_distance(mu: Tensor, proxy_mu: Tensor) -> Tensor:
    """Return minus the cosine of every embedding with every proxy, d_Cos.

    Args:
        mu: Directions of the embeddings, shape (B, D); normalised here.
        proxy_mu: Directions of the proxies, shape (C, D); normalised here.

    Returns:
        Distances in [-1, 1], shape (B, C).
    """
    u, p = checked_directions("mu", mu), checked_directions("proxy_mu", proxy_mu)
    dtype = common_dtype(mu=u, proxy_mu=p)
    return -(u.to(dtype) @ p.to(dtype).T)


def squared_euclidean_distance(mu: Tensor, kappa: Tensor, proxy_mu: Tensor, proxy_kappa: Tensor) -> Tensor:
    """Return ``|kappa mu - proxy_kappa proxy_mu|^2``, d_L2; the document defines it without a root.

    Args:
        mu: Directions of the embeddings, shape (B, D); normalised here.
        kappa: Concentrations of the embeddings, shape (B,) or (), finite and >= 0.
        proxy_mu: Directions of the proxies, shape (C, D); normalised here.
        proxy_kappa: Concentrations of the proxies, shape (C,) or (), finite and >= 0.

    Returns:
        Distances >= 0, shape (B, C), in squared units of the concentrations.

    Source: the law of cosines, before Eq. 44.
    """
    pairs = _pairs(mu, kappa, proxy_mu, proxy_kappa)
    k, other = pairs.kappa, pairs.proxy_kappa
    return ((k - other).square() + 2 * k * other * pairs.versine).to(pairs.dtype)


def _sum_and_deficit(pairs: _Pairs) -> tuple[Tensor, Tensor]:
    """Return ``s = |kappa mu + proxy_kappa proxy_mu|`` and ``kappa + proxy_kappa - s``, without cancellation."""
    k, other = pairs.kappa, pairs.proxy_kappa
    top = torch.maximum(k, other).detach()
    top = torch.where(top > 0, top, torch.ones_like(top))
    a, b = k / top, other / top
    square = (a - b).square() + 2 * a * b * (2 - pairs.versine)
    # The root has no derivative at 0, but the distances have one: the derivative for a length that stays 0.
    opposite = square <= 0
    relative = torch.where(opposite, torch.ones_like(square), square).sqrt()
    length = torch.where(opposite, torch.zeros_like(square), top * relative)
    deficit = torch.where(opposite, k + other, top * (2 * a * b * pairs.versine / (a + b + relative)))
    return length, deficit


def bhattacharyya_distance(mu: Tensor, kappa: Tensor, proxy_mu: Tensor, proxy_kappa: Tensor) -> Tensor:
    """Return the Bhattacharyya distance ``-log of the integral of sqrt(p q)``, d_B-vMF.

    ``log C(|a + b| / 2) - log C(|a|) / 2 - log C(|b|) / 2`` with ``a = kappa mu`` and ``b = proxy_kappa proxy_mu``.

    Args:
        mu: Directions of the embeddings, shape (B, D); normalised here.
        kappa: Concentrations of the embeddings, shape (B,) or (), finite and >= 0.
        proxy_mu: Directions of the proxies, shape (C, D); normalised here.
        proxy_kappa: Concentrations of the proxies, shape (C,) or (), finite and >= 0.

    Returns:
        Distances (in nats), shape (B, C): >= 0, and 0 for equal distributions, up to rounding.

    Source: Eq. 29.
    """
    pairs = _pairs(mu, kappa, proxy_mu, proxy_kappa)
    length, deficit = _sum_and_deficit(pairs)
    ends = (of_kappa(pairs.kappa, pairs.dim, "gain") + of_kappa(pairs.proxy_kappa, pairs.dim, "gain")) / 2
    return (of_kappa(length / 2, pairs.dim, "gain") - ends + deficit / 2).to(pairs.dtype)


def expected_likelihood_distance(mu: Tensor, kappa: Tensor, proxy_mu: Tensor, proxy_kappa: Tensor) -> Tensor:
    """Return ``-log of the integral of p q``, the expected likelihood distance or mutual likelihood score, d_EL-vMF.

    ``log C(|a + b|) - log C(|a|) - log C(|b|)`` with ``a = kappa mu`` and ``b = proxy_kappa proxy_mu``. It can have
    either sign, and is not 0 for equal distributions.

    Args:
        mu: Directions of the embeddings, shape (B, D); normalised here.
        kappa: Concentrations of the embeddings, shape (B,) or (), finite and >= 0.
        proxy_mu: Directions of the proxies, shape (C, D); normalised here.
        proxy_kappa: Concentrations of the proxies, shape (C,) or (), finite and >= 0.

    Returns:
        Distances (in nats), shape (B, C).

    Source: Eq. 35.
    """
    pairs = _pairs(mu, kappa, proxy_mu, proxy_kappa)
    length, deficit = _sum_and_deficit(pairs)
    ends = of_kappa(pairs.kappa, pairs.dim, "gain") + of_kappa(pairs.proxy_kappa, pairs.dim, "gain")
    return (of_kappa(length, pairs.dim, "gain") - ends + deficit + log_surface(pairs.dim)).to(pairs.dtype)


def kl_distance(mu: Tensor, kappa: Tensor, proxy_mu: Tensor, proxy_kappa: Tensor) -> Tensor:
    """Return the correct Kullback-Leibler divergence from every embedding to every proxy, d_KL-vMF.

    It is ``log C(kappa) - log C(proxy_kappa) + A(kappa) (kappa - proxy_kappa cos)``, like ``kl_divergence`` for single
    pairs.

    Args:
        mu: Directions of the embeddings, shape (B, D); normalised here.
        kappa: Concentrations of the embeddings, shape (B,) or (), finite and >= 0.
        proxy_mu: Directions of the proxies, shape (C, D); normalised here.
        proxy_kappa: Concentrations of the proxies, shape (C,) or (), finite and >= 0.

    Returns:
        Divergences (in nats), shape (B, C): >= 0, and 0 for equal distributions, up to rounding.

    Source: Eq. 38, with the mean ``A(kappa) mu`` inserted.
    """
    pairs = _pairs(mu, kappa, proxy_mu, proxy_kappa)
    k, other, dim = pairs.kappa, pairs.proxy_kappa, pairs.dim
    modes = of_kappa(k, dim, "gain") - of_kappa(other, dim, "gain")
    spread, mean_length = of_kappa(k, dim, "complement"), of_kappa(k, dim, "ratio")
    return (modes + (other - k) * spread + other * mean_length * pairs.versine).to(pairs.dtype)


def kl_distance_printed(mu: Tensor, kappa: Tensor, proxy_mu: Tensor, proxy_kappa: Tensor) -> Tensor:
    """Return the document's printed d_KL-vMF, for comparison; it is not a divergence.

    It is ``log C(kappa) - log C(proxy_kappa) + kappa - proxy_kappa cos``: the mean of the distribution is replaced by
    its direction. For equal directions it falls without limit as ``proxy_kappa`` grows.

    Args:
        mu: Directions of the embeddings, shape (B, D); normalised here.
        kappa: Concentrations of the embeddings, shape (B,) or (), finite and >= 0.
        proxy_mu: Directions of the proxies, shape (C, D); normalised here.
        proxy_kappa: Concentrations of the proxies, shape (C,) or (), finite and >= 0.

    Returns:
        Numbers (in nats) of either sign, shape (B, C).

    Source: Eq. 39.
    """
    pairs = _pairs(mu, kappa, proxy_mu, proxy_kappa)
    modes = of_kappa(pairs.kappa, pairs.dim, "gain") - of_kappa(pairs.proxy_kappa, pairs.dim, "gain")
    return (modes + pairs.proxy_kappa * pairs.versine).to(pairs.dtype)
