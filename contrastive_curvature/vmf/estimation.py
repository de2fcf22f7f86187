"""Estimate a von Mises-Fisher distribution from samples (Sra 2012; Warburg et al. 2023, Eq. 42-43)."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.vmf._checks import check_dim, check_finite, check_real, unit

__all__ = ["concentration", "fit", "mean_direction"]


def sra(rbar: Tensor, spread: Tensor, dim: int) -> Tensor:
    """Return Sra's estimate of kappa from ``rbar`` and ``spread = 1 - rbar^2``.

    ``spread`` is a separate argument because the difference would cancel for ``rbar`` near 1. It is clamped to at least
    eps^2 of its dtype, the smallest spread that samples of this dtype can resolve; so kappa is at most ``(D - 1) /
    eps^2``, and the gradient is zero for smaller spreads.
    """
    eps = torch.finfo(spread.dtype).eps
    floored = spread.clamp(min=eps * eps)
    return rbar * (dim - 1 + floored) / floored


def _mean(samples: Tensor, least: int) -> tuple[Tensor, Tensor]:
    checked = check_real("samples", samples)
    if checked.ndim < 2 or checked.shape[0] < least:
        raise InputError(expected("samples", f"shape (S, ..., D) with S >= {least}", tuple(checked.shape)))
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
        samples: Shape (S, ..., D), S >= 1, D >= 2, no zero vectors. Each sample is divided by its norm first, so raw
            encoder outputs and unit embeddings are both allowed.

    Returns:
        ``mu`` (..., D), unit vectors, and ``Rbar`` (...) in [0, 1]. If ``Rbar`` is zero up to rounding, the
        samples have no mean direction, and ``mu`` is the first sample, so that it is always a unit vector.

    Raises:
        InputTypeError: If ``samples`` is not a floating-point tensor.
        InputError: If the shape is not (S, ..., D), S < 1, D < 2, an entry is not finite, or a sample is zero.

    Source: Warburg et al. (2023), Eq. 42.
    """
    return _direction(*_mean(samples, 1))


def concentration(rbar: Tensor, dim: int) -> Tensor:
    """Return Sra's estimate ``kappa = Rbar (D - Rbar^2) / (1 - Rbar^2)``.

    ``Rbar`` is clamped to at most ``1 - eps`` of its dtype, so kappa is at most about ``(D - 1) / (2 eps)`` (float64:
    2.3e15 (D - 1)); values and gradients are finite everywhere, and the gradient is zero above this bound. ``fit`` and
    ``concentration_from_gaussian`` compute ``1 - Rbar^2`` to full precision and have a larger bound.

    Args:
        rbar: Mean resultant lengths, any shape, in [0, 1]; an excess over 1 of up to 8 eps is accepted as rounding.
        dim: Ambient dimension D >= 2.

    Returns:
        Concentrations >= 0 (dimensionless) with the shape and dtype of ``rbar``.

    Raises:
        InputTypeError: If ``rbar`` is not a floating-point tensor or ``dim`` not an int.
        InputError: If ``rbar`` is outside [0, 1] or not finite, or ``dim`` < 2.

    Source: Sra (2012); Warburg et al. (2023), Eq. 43.
    """
    checked, dim = check_real("rbar", rbar), check_dim(dim)
    check_finite("rbar", checked)
    eps = torch.finfo(checked.dtype).eps
    outside = (checked < 0) | (checked > 1 + 8 * eps)
    if bool(outside.any()):
        raise InputError(expected("rbar", "values in [0, 1]", float(checked[outside].flatten()[0])))
    clamped = checked.clamp(max=1 - eps)
    return sra(clamped, (1 - clamped) * (1 + clamped), dim)


def fit(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate mean direction and concentration from samples.

    ``1 - Rbar^2`` is computed as the mean squared distance of the normalised samples to their mean. On the sphere this
    is the same number, and it stays accurate if the samples almost agree.

    Args:
        samples: Shape (S, ..., D), S >= 2, D >= 2; each sample is divided by its norm first.

    Returns:
        ``mu`` (..., D), unit vectors (see ``mean_direction``), and ``kappa`` (...), at most ``(D - 1) / eps^2`` of the
        dtype, reached when all samples coincide; there the gradient is zero.

    Raises:
        InputTypeError: If ``samples`` is not a floating-point tensor.
        InputError: If the shape is not (S, ..., D), S < 2 (one sample has no spread), D < 2, an entry is
            not finite, or a sample is zero.

    Source: Sra (2012); Warburg et al. (2023), Eq. 42-43.
    """
    u, mean = _mean(samples, 2)
    mu, rbar = _direction(u, mean)
    spread = (u - mean).square().sum(-1).mean(0).clamp(max=1.0)
    return mu, sra(rbar, spread, u.shape[-1])
