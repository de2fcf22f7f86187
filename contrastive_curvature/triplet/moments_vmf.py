"""Mean and variance of the difference of two squared distances between von Mises-Fisher embeddings."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.triplet.moments import TauMoments
from contrastive_curvature.vmf._checks import broadcast_batch, check_kappa, unit
from contrastive_curvature.vmf.normalizer import of_kappa

__all__ = ["Directed", "Spread", "moments_of_vmf", "spread_of", "tau_moments_vmf"]


class Spread(NamedTuple):
    """First two moments of von Mises-Fisher distributions, each (...).

    Attributes:
        length: Norm A of the mean.
        complement: ``1 - A``.
        along: Variance along the mean direction, ``A'(kappa)``.
        across: Variance along every direction orthogonal to it, ``A / kappa``.
    """

    length: Tensor
    complement: Tensor
    along: Tensor
    across: Tensor


class Directed(NamedTuple):
    """A checked embedding in float64: a mean direction of norm 1, (..., D), and the moments (...) of its kappa."""

    direction: Tensor
    spread: Spread


def spread_of(kappa: Tensor, dim: int) -> Spread:
    """Return the moments for checked concentrations, in float64."""
    length, complement, along = (of_kappa(kappa, dim, name) for name in ("ratio", "complement", "slope"))
    # A / kappa has no value at kappa = 0, and a derivative that cancels close to it; there the trace of the covariance,
    # 1 - A^2, which loses digits where kappa is large, gives the same.
    few = kappa.square() <= dim
    near = (1 - length.square() - along) / (dim - 1)
    return Spread(length, complement, along, torch.where(few, near, length / torch.where(few, 1.0, kappa)))


def _cosines(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cosine of two unit vectors, its square, and the squared sine, which keeps its digits where it is small."""
    apart, together = (x - y).square().sum(-1), (x + y).square().sum(-1)
    cosine = (together - apart) / 4
    return cosine, cosine.square(), apart * together / 4


def moments_of_vmf(anchor: Directed, positive: Directed, negative: Directed) -> TauMoments:
    """Return the moments of tau for checked embeddings, in float64."""
    (a, of_a), (p, of_p), (n, of_n) = anchor, positive, negative
    dim = a.shape[-1]
    # tau = 2 <a, n - p> for unit vectors. The mean of n - p, from differences, which do not cancel:
    shorter = of_p.complement - of_n.complement
    to_negative = of_n.length.unsqueeze(-1) * (n - p) + shorter.unsqueeze(-1) * p
    cosine_p, _, _ = _cosines(a, p)
    # <a, n - p> = (|a - p|^2 - |a - n|^2) / 2
    inner = of_n.length * ((p - n) * (p + n - 2 * a)).sum(-1) / 2 + shorter * cosine_p
    across = (to_negative - inner.unsqueeze(-1) * a).square().sum(-1)
    variance = of_a.across * across + of_a.along * inner.square()
    for direction, spread in ((p, of_p), (n, of_n)):
        _, squared, rest = _cosines(a, direction)
        variance = variance + of_a.length.square() * (spread.along * squared + spread.across * rest)
        both = (dim - 1) * of_a.across * spread.across + of_a.along * spread.along
        one = (dim - 2) * of_a.across * spread.across + of_a.along * spread.across + of_a.across * spread.along
        variance = variance + both * squared + one * rest
    return TauMoments(2 * of_a.length * inner, 4 * variance)


def _directed(name: str, value: object) -> tuple[Directed, torch.dtype]:
    if not isinstance(value, tuple) or len(value) != 2:
        received = f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
        raise InputTypeError(expected(name, "a tuple (mu, kappa) of two tensors", received))
    direction, _ = unit(f"mu of {name}", value[0])
    if isinstance(value[1], Tensor) and value[1].device != direction.device:
        wanted = f"a tensor on {direction.device}"
        raise InputError(expected(f"kappa of {name}", wanted, f"one on {value[1].device}"))
    try:
        kappa = check_kappa(value[1])
    except (InputError, InputTypeError) as error:
        raise type(error)(str(error).replace("kappa", f"kappa of {name}", 1)) from None
    if kappa.shape != direction.shape[:-1]:
        wanted = f"shape {tuple(direction.shape[:-1])}, one for each direction"
        raise InputError(expected(f"kappa of {name}", wanted, tuple(kappa.shape)))
    # Normalised in float64: in float32 the norm of a direction is off by 1e-7, far more than small differences here.
    precise, _ = unit(f"mu of {name}", value[0].double())
    return Directed(precise, spread_of(kappa.double(), precise.shape[-1])), torch.promote_types(
        direction.dtype, kappa.dtype
    )


def tau_moments_vmf(
    anchor: tuple[Tensor, Tensor], positive: tuple[Tensor, Tensor], negative: tuple[Tensor, Tensor]
) -> TauMoments:
    """Return mean and variance of ``tau = |a - p|^2 - |a - n|^2`` for independent von Mises-Fisher embeddings.

    On the sphere ``tau = 2 <a, n - p>``. A von Mises-Fisher distribution has the mean ``A mu`` and the variances
    ``r = A'(kappa)`` along ``mu`` and ``t = A / kappa`` across it, with the mean resultant length ``A``. Let
    ``d = A_n mu_n - A_p mu_p``, with the parts ``d_1`` along ``mu_a`` and ``d_2`` across it, and ``c`` and ``s`` cosine
    and sine between ``mu_a`` and ``mu_p`` (or ``mu_n``). Then

        E[tau]   = 2 A_a d_1
        Var[tau] = 4 [t_a d_2^2 + r_a d_1^2 + V_p + V_n],  with for p, and likewise for n,
        V_p = A_a^2 [r_p c^2 + t_p s^2] + [(D - 1) t_a t_p + r_a r_p] c^2 + [(D - 2) t_a t_p + r_a t_p + t_a r_p] s^2

    Both are exact for every D; every term is >= 0, and nothing cancels.

    Args:
        anchor: Mean directions (..., D), D >= 2, normalised here, and concentrations (...), finite and >= 0.
        positive: The same for the embedding that should be close.
        negative: The same for the embedding that should be far.

    Returns:
        The moments, each with the broadcast batch shape; once differentiable, with respect to the means twice.

    Raises:
        InputTypeError: An embedding is not a tuple of two floating-point tensors.
        InputError: A shape does not fit, the dimensions or the devices differ, the batch shapes do not broadcast, an
            entry is not finite, a direction is zero, or a concentration is negative.

    Source: the moments of Warburg et al. (2021), for their von Mises-Fisher embeddings, which they take for Gaussians.
    """
    a, a_dtype = _directed("anchor", anchor)
    p, p_dtype = _directed("positive", positive)
    n, n_dtype = _directed("negative", negative)
    dims = {name: one.direction.shape[-1] for name, one in (("anchor", a), ("positive", p), ("negative", n))}
    if len(set(dims.values())) > 1:
        shown = ", ".join(f"{name} {dim}" for name, dim in dims.items())
        raise InputError(expected("anchor, positive, negative", "one dimension D", shown))
    broadcast_batch(anchor=(a.direction, 1), positive=(p.direction, 1), negative=(n.direction, 1))
    dtype = torch.promote_types(a_dtype, torch.promote_types(p_dtype, n_dtype))
    mean, variance = moments_of_vmf(a, p, n)
    return TauMoments(mean.to(dtype), variance.to(dtype))
