"""Concentration of the direction of a Gaussian vector, in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.vmf._checks import check_finite, check_real, unit
from contrastive_curvature.vmf.estimation import sra

__all__ = ["concentration", "concentration_from_gaussian", "tangential_variance"]


def _checked_spread(mean: Tensor, variance: Tensor | None, covariance: Tensor | None) -> Tensor:
    if (variance is None) == (covariance is None):
        received = "neither" if variance is None else "both"
        raise InputError(expected("variance, covariance", "exactly one of the two", received))
    name, given = ("variance", variance) if covariance is None else ("covariance", covariance)
    checked = check_real(name, given)
    wanted = tuple(mean.shape) if covariance is None else (*mean.shape, mean.shape[-1])
    if tuple(checked.shape) != wanted:
        raise InputError(expected(name, f"shape {wanted} to fit mean {tuple(mean.shape)}", tuple(checked.shape)))
    if checked.device != mean.device:
        raise InputError(expected(name, f"device {mean.device}, that of mean", str(checked.device)))
    check_finite(name, checked)
    diagonal = checked if covariance is None else checked.diagonal(dim1=-2, dim2=-1)
    if bool((diagonal < 0).any()):
        raise InputError(expected(name, "variances >= 0", float(diagonal.min())))
    return checked


def tangential_variance(mean: Tensor, *, variance: Tensor | None = None, covariance: Tensor | None = None) -> Tensor:
    """Return the variance of ``z ~ N(mean, V)`` perpendicular to its mean, divided by ``|mean|^2``.

    ``tv = tr(P V P) / n^2 = (tr V - u^T V u) / n^2`` with ``n = |mean|``, ``u = mean / n`` and ``P = I - u u^T``. The
    variance along ``u`` does not change the direction and does not count. The rounding error is of the order of eps
    ``tr V / n^2``: a smaller tangential variance may be returned as zero.

    Args:
        mean: Raw encoder outputs (not normalised), shape (..., D), D >= 2, none zero.
        variance: Diagonal of V, shape (..., D), >= 0, in squared units of ``mean``.
        covariance: V, shape (..., D, D), positive semidefinite. Give exactly one of the two.

    Returns:
        Tangential variances (...) >= 0, in squared radians to first order.

    Raises:
        InputTypeError: If an argument is not a floating-point tensor.
        InputError: If both or neither of ``variance`` and ``covariance`` are given, a shape or device disagrees, an
            entry is not finite, a variance is negative, ``covariance`` has a negative variance along or perpendicular
            to the mean, a mean is zero, or D < 2.
    """
    u, norm = unit("mean", mean)
    spread = _checked_spread(u, variance, covariance)
    # Divided twice, because the square of a tiny or huge norm underflows or overflows.
    if covariance is None:
        relative = spread / norm.unsqueeze(-1) / norm.unsqueeze(-1)
        total = relative.sum(-1)
        radial = (relative * u * u).sum(-1)
    else:
        blocks = spread / norm[..., None, None] / norm[..., None, None]
        total = blocks.diagonal(dim1=-2, dim2=-1).sum(-1)
        radial = torch.einsum("...i,...ij,...j->...", u, blocks, u)
    across = total - radial
    rounding = 64 * u.shape[-1] * torch.finfo(u.dtype).eps * total.detach()
    if bool((across < -rounding).any() | (radial < -rounding).any()):
        received = f"u^T V u = {float(radial.min()):.3g}, tr V - u^T V u = {float(across.min()):.3g}"
        raise InputError(expected("covariance", "a positive semidefinite matrix", received))
    return across.clamp(min=0.0)


def concentration_from_gaussian(
    mean: Tensor, *, variance: Tensor | None = None, covariance: Tensor | None = None
) -> Tensor:
    """Return kappa of the direction of ``z ~ N(mean, V)``, over RAW outputs, in closed form.

    The tangential variance tv gives ``Rbar = 1 / sqrt(1 + tv)``, and Sra's estimate gives kappa. ``1 - Rbar^2`` is
    computed as ``tv / (1 + tv)`` without a subtraction, so kappa stays accurate for tiny tv, where it is ``(D - 1) /
    tv`` to leading order.

    This is a second-order result: relative to the exact distribution of ``z / |z|`` the error of ``1 - Rbar^2`` is of
    the order of tv and of ``u^T V u / n^2``. It is accurate if the spread of z is small compared with ``|mean|``;
    otherwise draw samples and use ``fit``.

    Args:
        mean: Raw encoder outputs, shape (..., D), D >= 2, none zero.
        variance: Diagonal of V, shape (..., D), >= 0, in squared units of ``mean``.
        covariance: V, shape (..., D, D), positive semidefinite. Give exactly one of the two.

    Returns:
        Concentrations (...), finite: at most ``(D - 1) / eps^2`` of the dtype, reached for tv = 0, where the gradient
        is zero.

    Raises:
        InputTypeError: If an argument is not a floating-point tensor.
        InputError: For the reasons given in ``tangential_variance``.

    Source: derived for this library, by projecting the Gaussian onto the tangent space at its mean; kappa from Rbar as
    in Sra (2012).
    """
    return concentration(tangential_variance(mean, variance=variance, covariance=covariance), mean.shape[-1])


def concentration(tv: Tensor, dim: int) -> Tensor:
    """Concentrations (...) of tangential variances (...) in D = ``dim`` dimensions."""
    return sra((1 + tv).rsqrt(), tv / (1 + tv), dim)
