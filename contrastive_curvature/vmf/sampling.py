"""Exact sampling by Wood's rejection (Wood 1994; Ulrich 1984), in a form without cancellation for huge kappa."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.vmf._checks import broadcast_batch, check_kappa, unit

__all__ = ["sample"]


def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    # 1 minus a number in [0, 1) is in (0, 1], so that the logarithms are finite.
    return 1 - torch.rand(like.shape, dtype=like.dtype, device=like.device, generator=generator)


def _propose(kappa: Tensor, dim: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Return ``1 - cos`` of one proposal per entry of ``kappa`` (M,), and whether it is accepted."""
    b = (dim - 1) / (2 * kappa + torch.hypot(2 * kappa, torch.full_like(kappa, dim - 1)))
    # T = rho cos(phi) is a coordinate of a uniform direction, so (1 + T)/2 is the symmetric Beta variable of Wood's
    # envelope (Ulrich 1984); both (1 + T)/2 and (1 - T)/2 are computed without cancellation.
    power = math.inf if dim == 2 else 2 / (dim - 2)
    tail = _uniform(kappa, generator).pow(power)  # 1 - rho^2
    half_phi = math.pi * _uniform(kappa, generator)
    rho = torch.sqrt(1 - tail)
    edge = tail / (1 + rho)  # 1 - rho
    near = (edge + 2 * rho * torch.cos(half_phi).square()) / 2  # (1 + T) / 2
    far = (edge + 2 * rho * torch.sin(half_phi).square()) / 2  # (1 - T) / 2
    denominator = far + b * near
    versine = 2 * b * near / denominator
    log_acceptance = kappa * (2 * b / (1 + b) - versine) + (dim - 1) * torch.log((1 + b) / (2 * denominator))
    return versine, torch.log(_uniform(kappa, generator)) <= log_acceptance


def _versines(kappa: Tensor, dim: int, generator: torch.Generator | None) -> Tensor:
    """Draw ``1 - <mu, u>`` for every entry of ``kappa`` (M,), in float64."""
    result = torch.empty_like(kappa)
    pending = torch.arange(kappa.numel(), device=kappa.device)
    while pending.numel():
        versine, accepted = _propose(kappa[pending], dim, generator)
        result[pending[accepted]] = versine[accepted]
        pending = pending[~accepted]
    return result


@torch.no_grad()
def sample(mu: Tensor, kappa: Tensor, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw directions from von Mises-Fisher distributions.

    Exact for every D >= 2 and every finite kappa >= 0 (kappa = 0 is uniform). The cosine is drawn in float64 whatever
    the dtype; no gradient flows through the draw.

    Args:
        mu: Mean directions, shape (..., D), D >= 2; normalised here, so none may be zero.
        kappa: Concentrations, finite and >= 0, whose shape broadcasts with the batch shape of ``mu``.
        n_samples: Number of directions to draw from each distribution, >= 1.
        generator: Random generator on the device of ``mu``; torch's default one if not given.

    Returns:
        Unit vectors, shape (n_samples, ..., D), with the dtype and device of ``mu``.

    Raises:
        InputTypeError: If ``mu`` or ``kappa`` is not a floating-point tensor, or ``n_samples`` not an int.
        InputError: If ``n_samples`` < 1, a mean direction is zero or not finite, ``kappa`` is negative or not finite,
            the shapes do not broadcast, or the devices of the arguments differ.

    Source: Wood, A. T. A. (1994), Simulation of the von Mises Fisher distribution, algorithm VM*.
    """
    m, _ = unit("mu", mu)
    checked = check_kappa(kappa)
    if isinstance(n_samples, bool) or not isinstance(n_samples, int):
        raise InputTypeError(expected("n_samples", "an int", n_samples))
    if n_samples < 1:
        raise InputError(expected("n_samples", ">= 1", n_samples))
    validate.generator(generator, m.device)
    batch = broadcast_batch(mu=(m, 1), kappa=(checked, 0))
    dim = m.shape[-1]
    shape = (n_samples, *batch)
    versine = _versines(checked.double().expand(shape).reshape(-1), dim, generator).reshape(*shape, 1)
    noise = torch.randn(*shape, dim, dtype=m.dtype, device=m.device, generator=generator)
    tangent = noise - (noise * m).sum(-1, keepdim=True) * m
    tangent = tangent / torch.linalg.vector_norm(tangent, dim=-1, keepdim=True).clamp(min=torch.finfo(m.dtype).tiny)
    sine = torch.sqrt(versine * (2 - versine)).to(m.dtype)
    drawn = m - versine.to(m.dtype) * m + sine * tangent
    return drawn / torch.linalg.vector_norm(drawn, dim=-1, keepdim=True)
