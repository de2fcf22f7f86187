"""Mean and variance of tau, the difference of two squared distances, of Gaussian or von Mises-Fisher embeddings."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.vmf.checks import broadcast_batch, check_kappa, same_dim, unit
from contrastive_curvature.vmf.density import of_kappa


class Gaussian(NamedTuple):
    """A checked embedding in float64: mean (..., D), variance (..., D) or (..., 1)."""

    mean: Tensor
    variance: Tensor
    dtype: torch.dtype
    """The dtype of results."""


def check_gaussian(mean_name: str, mean: object, variance_name: str, variance: object) -> Gaussian:
    """Return an embedding in float64: mean (..., D), and variance >= 0, (..., D) or (..., 1)."""
    centre, spread = validate.real(mean_name, mean), validate.real(variance_name, variance)
    if centre.ndim < 1 or centre.shape[-1] < 1:
        raise InputError(mean_name, "shape (..., D) with D >= 1", tuple(centre.shape))
    diagonal, isotropic = tuple(centre.shape), (*centre.shape[:-1], 1)
    if tuple(spread.shape) not in (diagonal, isotropic):
        wanted = f"shape {diagonal} (diagonal)" + (f" or {isotropic} (isotropic)" if diagonal != isotropic else "")
        raise InputError(variance_name, wanted, tuple(spread.shape))
    if bool((spread < 0).any()):
        hint = "A network's output becomes a variance by torch.nn.functional.softplus or torch.exp."
        raise InputError(variance_name, "variances >= 0", float(spread.min()), hint)
    return Gaussian(centre.double(), spread.double(), torch.promote_types(centre.dtype, spread.dtype))


def _pair(name: str, value: object) -> Gaussian:
    mean, variance = check_pair(name, value)
    return check_gaussian(f"mean of {name}", mean, f"variance of {name}", variance)


def check_pair(name: str, value: object, names: str = "(mean, variance)") -> tuple[Tensor, Tensor]:
    """Return the two parts of an embedding; refuse anything but a tuple of two tensors."""
    if not isinstance(value, tuple) or len(value) != 2:
        got = f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
        raise InputTypeError(name, f"a tuple {names} of two tensors", got)
    return value


def check_triplet(
    anchor: object, positive: object, negative: object
) -> tuple[tuple[Gaussian, Gaussian, Gaussian], torch.dtype]:
    """Return three embeddings in float64 and the dtype of results; check that their shapes go together."""
    a, p, n = _pair("anchor", anchor), _pair("positive", positive), _pair("negative", negative)
    same_dim(anchor=a.mean, positive=p.mean, negative=n.mean)
    broadcast_batch(anchor=(a.mean, 1), positive=(p.mean, 1), negative=(n.mean, 1))
    return (a, p, n), torch.promote_types(a.dtype, torch.promote_types(p.dtype, n.dtype))


class TauMoments(NamedTuple):
    """The first two moments of tau, each with the batch shape.

    Attributes:
        mean: ``E[tau]``, in squared units of the embedding; negative where the anchor is closer to the positive.
        variance: ``Var[tau]``, in fourth powers of these units.
    """

    mean: Tensor
    variance: Tensor


def _representable(moments: TauMoments) -> TauMoments:
    bad = sum(int((~torch.isfinite(moment)).sum()) for moment in moments)
    if bad:
        hint = f"{moments.mean.dtype} overflows. Scale the embeddings down."
        raise InputError("anchor, positive, negative", "finite moments of tau", f"{bad} infinite", hint)
    return moments


def moments_of(anchor: Gaussian, positive: Gaussian, negative: Gaussian) -> TauMoments:
    """Return the moments of tau for checked embeddings, in float64."""
    (a, a_var, _), (p, p_var, _), (n, n_var, _) = anchor, positive, negative
    # With only differences of the means, every term of the variance is >= 0, and close embeddings far from the origin
    # lose no digits. The printed forms, polynomials in the means, cancel.
    to_positive, to_negative, apart = p - a, n - a, p - n
    mean = (apart * (to_positive + to_negative) + (p_var - n_var)).sum(-1)
    first_order = to_positive.square() * p_var + to_negative.square() * n_var + apart.square() * a_var
    second_order = p_var.square() + n_var.square() + 2 * a_var * (p_var + n_var)
    return _representable(TauMoments(mean, (4 * first_order + 2 * second_order).sum(-1)))


def tau_moments(
    anchor: tuple[Tensor, Tensor], positive: tuple[Tensor, Tensor], negative: tuple[Tensor, Tensor]
) -> TauMoments:
    """Return mean and variance of ``tau = |a - p|^2 - |a - n|^2`` for independent Gaussian embeddings.

    Per dimension, with the differences of the means ``u = p - a``, ``v = n - a``, ``u - v = p - n``, and summed over
    the dimensions (an isotropic variance counts in each of them):

        E[tau]   = (u - v)(u + v) + s_p - s_n
        Var[tau] = 4 [u^2 s_p + v^2 s_n + (u - v)^2 s_a] + 2 s_p^2 + 2 s_n^2 + 4 s_a (s_p + s_n)

    Both moments are exact for any D; only the normal distribution with these moments is an approximation.

    Args:
        anchor: Mean (..., D) and variance (..., D) or (..., 1), the latter >= 0.
        positive: The same for the embedding that should be close.
        negative: The same for the embedding that should be far.

    Returns:
        The moments, each with the broadcast batch shape.

    Raises:
        InputError: A moment overflows.

    Source: Eq. 5, and Eq. 17, 18 and 26 inserted in Eq. 7, of the supplement of Warburg et al. (2021), rearranged. The
    variance on their poster (step 6) has two wrong signs.
    """
    embeddings, dtype = check_triplet(anchor, positive, negative)
    mean, variance = moments_of(*embeddings)
    return _representable(TauMoments(mean.to(dtype), variance.to(dtype)))


class VmfSpread(NamedTuple):
    """First two moments of von Mises-Fisher distributions, each (...).

    Attributes:
        length: Norm A of the mean.
        complement: ``1 - A``.
        along: Variance along the mean direction, ``A'(kappa)``.
        across: Variance along every direction orthogonal to the mean direction, ``A / kappa``.
    """

    length: Tensor
    complement: Tensor
    along: Tensor
    across: Tensor


class Directed(NamedTuple):
    """A checked embedding in float64: a mean direction of norm 1, (..., D), and the moments (...) of its kappa."""

    direction: Tensor
    spread: VmfSpread


def spread_of(kappa: Tensor, dim: int) -> VmfSpread:
    """Return the moments for checked concentrations, in float64."""
    length, complement, along = (of_kappa(kappa, dim, name) for name in ("ratio", "complement", "slope"))
    # A / kappa has no value at kappa = 0, and near it the derivative cancels. There the trace of the covariance, 1 -
    # A^2, gives the same number; it loses digits for large kappa.
    few = kappa.square() <= dim
    near = (1 - length.square() - along) / (dim - 1)
    return VmfSpread(length, complement, along, torch.where(few, near, length / torch.where(few, 1.0, kappa)))


def _cosines(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cosine of two unit vectors, its square, and the squared sine, without cancellation."""
    apart, together = (x - y).square().sum(-1), (x + y).square().sum(-1)
    cosine = (together - apart) / 4
    return cosine, cosine.square(), apart * together / 4


def moments_of_vmf(anchor: Directed, positive: Directed, negative: Directed) -> TauMoments:
    """Return the moments of tau for checked embeddings, in float64."""
    (a, of_a), (p, of_p), (n, of_n) = anchor, positive, negative
    dim = a.shape[-1]
    # tau = 2 <a, n - p> for unit vectors. The mean of n - p is computed from differences, which do not cancel.
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
    mu, kappa = check_pair(name, value, "(mu, kappa)")
    direction, _ = unit(f"mu of {name}", mu)
    kappa = check_kappa(kappa, f"kappa of {name}")
    if kappa.shape != direction.shape[:-1]:
        wanted = f"shape {tuple(direction.shape[:-1])}, one for each direction"
        raise InputError(f"kappa of {name}", wanted, tuple(kappa.shape))
    # Normalise in float64: in float32 the norm of a direction has an error of 1e-7, far more than small differences
    # here.
    precise, _ = unit(f"mu of {name}", mu.double())
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

    Both moments are exact for every D; every term is >= 0, and nothing cancels.

    Args:
        anchor: Mean directions (..., D), D >= 2, normalised here, and concentrations (...), finite and >= 0.
        positive: The same for the embedding that should be close.
        negative: The same for the embedding that should be far.

    Returns:
        The moments, each with the broadcast batch shape; once differentiable, with respect to the means twice.

    Source: the moments of Warburg et al. (2021) for von Mises-Fisher embeddings, which they treat as Gaussians.
    """
    a, a_dtype = _directed("anchor", anchor)
    p, p_dtype = _directed("positive", positive)
    n, n_dtype = _directed("negative", negative)
    same_dim(anchor=a.direction, positive=p.direction, negative=n.direction)
    broadcast_batch(anchor=(a.direction, 1), positive=(p.direction, 1), negative=(n.direction, 1))
    dtype = torch.promote_types(a_dtype, torch.promote_types(p_dtype, n_dtype))
    mean, variance = moments_of_vmf(a, p, n)
    return TauMoments(mean.to(dtype), variance.to(dtype))
