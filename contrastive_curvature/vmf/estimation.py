"""Estimate a von Mises-Fisher distribution from samples, or for the direction of a Gaussian vector.

Source: Sra (2012); Warburg et al. (2023), Eq. 42-43.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError
from contrastive_curvature.vmf.checks import check_dim, unit


def sra(rbar: Tensor, spread: Tensor, dim: int) -> Tensor:
    """Return Sra's estimate of kappa from ``rbar`` and ``spread = 1 - rbar^2``.

    ``spread`` is a separate argument because the difference would cancel for ``rbar`` near 1. It is clamped to at least
    eps^2 of its dtype, the smallest spread that samples of this dtype can resolve. So kappa is at most
    ``(D - 1) / eps^2``, and the gradient is zero for smaller spreads.
    """
    eps = torch.finfo(spread.dtype).eps
    floored = spread.clamp(min=eps * eps)
    return rbar * (dim - 1 + floored) / floored


def _mean(samples: Tensor, least: int) -> tuple[Tensor, Tensor]:
    checked = validate.real("samples", samples)
    if checked.ndim < 2 or checked.shape[0] < least:
        raise InputError("samples", f"shape (S, ..., D) with S >= {least}", tuple(checked.shape))
    u, _ = unit("samples", checked)
    return u, u.mean(0)


def _direction(u: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    rbar = torch.linalg.vector_norm(mean, dim=-1)
    degenerate = (rbar <= torch.finfo(rbar.dtype).eps).unsqueeze(-1)
    divisor = torch.where(degenerate, torch.ones_like(mean), rbar.unsqueeze(-1))
    return torch.where(degenerate, u[0], mean / divisor), rbar.clamp(max=1.0)


def mean_direction(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean direction and the mean resultant length of samples.

    Args:
        samples: Shape (S, ..., D), S >= 1, D >= 2, none zero; each is divided by its norm first.

    Returns:
        Unit vectors ``mu`` (..., D), and ``Rbar`` (...) in [0, 1]. If ``Rbar`` is zero up to rounding, there is no mean
        direction, and ``mu`` is the first sample.

    Source: Warburg et al. (2023), Eq. 42.
    """
    return _direction(*_mean(samples, 1))


def concentration(rbar: Tensor, dim: int) -> Tensor:
    """Return Sra's estimate ``kappa = Rbar (D - Rbar^2) / (1 - Rbar^2)``.

    ``Rbar`` is clamped to at most ``1 - eps`` of its dtype, so kappa is at most about ``(D - 1) / (2 eps)``, with a
    gradient of zero there. ``fit`` and ``concentration_from_gaussian`` compute ``1 - Rbar^2`` to full precision, so
    their bound is larger.

    Args:
        rbar: Mean resultant lengths, any shape, in [0, 1]; an excess over 1 of up to 8 eps is accepted as rounding.
        dim: Ambient dimension D >= 2.

    Returns:
        Concentrations >= 0 (dimensionless) with the shape and dtype of ``rbar``.

    Source: Sra (2012); Warburg et al. (2023), Eq. 43.
    """
    checked, dim = validate.real("rbar", rbar), check_dim(dim)
    eps = torch.finfo(checked.dtype).eps
    outside = (checked < 0) | (checked > 1 + 8 * eps)
    if bool(outside.any()):
        raise InputError("rbar", "values in [0, 1]", float(checked[outside].flatten()[0]))
    clamped = checked.clamp(max=1 - eps)
    return sra(clamped, (1 - clamped) * (1 + clamped), dim)


def fit(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate mean direction and concentration from samples.

    ``1 - Rbar^2`` is computed as the mean squared distance of the normalised samples to their mean, which stays
    accurate if the samples almost agree.

    Args:
        samples: Shape (S, ..., D), S >= 2, D >= 2; each sample is divided by its norm first.

    Returns:
        ``mu`` (..., D), unit vectors (see ``mean_direction``), and ``kappa`` (...), at most ``(D - 1) / eps^2`` of the
        dtype, reached when all samples coincide; there the gradient is zero.

    Source: Sra (2012); Warburg et al. (2023), Eq. 42-43.
    """
    u, mean = _mean(samples, 2)
    mu, rbar = _direction(u, mean)
    spread = (u - mean).square().sum(-1).mean(0).clamp(max=1.0)
    return mu, sra(rbar, spread, u.shape[-1])


def _checked_spread(mean: Tensor, variance: Tensor | None, covariance: Tensor | None) -> Tensor:
    if (variance is None) == (covariance is None):
        got = "neither" if variance is None else "both"
        raise InputError("variance, covariance", "exactly one of the two", got)
    name, value = ("variance", variance) if covariance is None else ("covariance", covariance)
    checked = validate.real(name, value)
    wanted = tuple(mean.shape) if covariance is None else (*mean.shape, mean.shape[-1])
    if tuple(checked.shape) != wanted:
        raise InputError(name, f"shape {wanted} to fit mean {tuple(mean.shape)}", tuple(checked.shape))
    diagonal = checked if covariance is None else checked.diagonal(dim1=-2, dim2=-1)
    if bool((diagonal < 0).any()):
        raise InputError(name, "variances >= 0", float(diagonal.min()))
    return checked


def tangential_variance(mean: Tensor, *, variance: Tensor | None = None, covariance: Tensor | None = None) -> Tensor:
    """Return the variance of ``z ~ N(mean, V)`` perpendicular to its mean, divided by ``|mean|^2``.

    ``tv = tr(P V P) / n^2 = (tr V - u^T V u) / n^2`` with ``n = |mean|``, ``u = mean / n`` and ``P = I - u u^T``: the
    variance along ``u`` does not change the direction. The rounding error is about eps ``tr V / n^2``.

    Args:
        mean: Raw encoder outputs (not normalised), shape (..., D), D >= 2, none zero.
        variance: Diagonal of V, shape (..., D), >= 0, in squared units of ``mean``.
        covariance: V, shape (..., D, D), positive semidefinite. Give exactly one of ``variance`` and ``covariance``.

    Returns:
        Tangential variances (...) >= 0, in squared radians to first order.
    """
    u, norm = unit("mean", mean)
    spread = _checked_spread(u, variance, covariance)
    # Divide twice, because the square of a tiny or huge norm underflows or overflows.
    if covariance is None:
        relative = spread / norm.unsqueeze(-1) / norm.unsqueeze(-1)
        total = relative.sum(-1)
        radial = (relative * u * u).sum(-1)
    else:
        blocks = spread / norm[..., None, None] / norm[..., None, None]
        total = blocks.diagonal(dim1=-2, dim2=-1).sum(-1)
        radial = torch.einsum("...i,...ij,...j->...", u, blocks, u)
    across = total - radial
    check_semidefinite(across, radial, 64 * u.shape[-1] * torch.finfo(u.dtype).eps * total.detach())
    return across.clamp(min=0.0)


def check_semidefinite(across: Tensor, radial: Tensor, rounding: Tensor) -> None:
    """Refuse a covariance whose variance across or along the mean, (...) each, is negative beyond rounding."""
    if bool((across < -rounding).any() | (radial < -rounding).any()):
        got = f"u^T V u = {float(radial.min()):.3g}, tr V - u^T V u = {float(across.min()):.3g}"
        raise InputError("covariance", "a positive semidefinite matrix", got)


def concentration_from_gaussian(
    mean: Tensor, *, variance: Tensor | None = None, covariance: Tensor | None = None
) -> Tensor:
    """Return kappa for the direction of ``z ~ N(mean, V)`` over RAW outputs, in closed form.

    The tangential variance tv gives ``Rbar = 1 / sqrt(1 + tv)``, and Sra's estimate gives kappa, to leading order
    ``(D - 1) / tv``. This is accurate if the spread of z is small compared with ``|mean|`` (the relative error of
    ``1 - Rbar^2`` is of the order of tv and of ``u^T V u / n^2``); otherwise draw samples and use ``fit``.

    Args:
        mean: Raw encoder outputs, shape (..., D), D >= 2, none zero.
        variance: Diagonal of V, shape (..., D), >= 0, in squared units of ``mean``.
        covariance: V, shape (..., D, D), positive semidefinite. Give exactly one of ``variance`` and ``covariance``.

    Returns:
        Concentrations (...), finite: at most ``(D - 1) / eps^2`` of the dtype, reached for tv = 0, where the gradient
        is zero.

    Source: derived for this library, by projection onto the tangent space at the mean; kappa as in Sra (2012).
    """
    return concentration_of_variance(
        tangential_variance(mean, variance=variance, covariance=covariance), mean.shape[-1]
    )


def concentration_of_variance(tv: Tensor, dim: int) -> Tensor:
    """Return concentrations (...) of tangential variances (...) in D = ``dim`` dimensions."""
    return sra((1 + tv).rsqrt(), tv / (1 + tv), dim)
