"""Exact samples, and samples through which gradients reach the mean direction and the concentration.

The samples come from Wood's rejection (Wood 1994; Ulrich 1984), in a form without cancellation for huge kappa.

Gradients: the angle theta from the mean direction has the density ``h(theta) ~ exp(kappa cos theta) sin^(D-2) theta``.
Implicit reparameterisation (Figurnov et al. 2018) holds its distribution function ``F(theta; kappa)`` fixed:

    d theta / d kappa = -(1 / h(theta)) * integral over [0, theta] of (cos phi - A) h(phi) d phi,

and the integral over [theta, pi] of ``(A - cos phi) h(phi)`` is the same number. The code uses the side without a
change of sign, so that nothing cancels. For a Gauss-Legendre rule, the integral is cut where h has fallen by
``exp(-40)``.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.vmf.checks import broadcast_batch, check_kappa, unit
from contrastive_curvature.vmf.density import of_kappa


def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    # 1 minus a number in [0, 1) is in (0, 1], so the logarithms are finite.
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

    Exact for every D >= 2 and kappa >= 0 (0 is uniform). No gradient flows through the draw.

    Args:
        mu: Mean directions, shape (..., D), D >= 2; normalised here, so none may be zero.
        kappa: Concentrations, finite and >= 0, whose shape broadcasts with the batch shape of ``mu``.
        n_samples: Number of directions to draw from each distribution, >= 1.
        generator: Random generator on the device of ``mu``; torch's default one if not given.

    Returns:
        Unit vectors, shape (n_samples, ..., D), with the dtype and device of ``mu``.

    Source: Wood, A. T. A. (1994), Simulation of the von Mises Fisher distribution, algorithm VM*.
    """
    m, _ = unit("mu", mu)
    checked = check_kappa(kappa)
    validate.count("n_samples", n_samples)
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


_FALL = 40.0
_HALVINGS = 60
_NODES = 64


@lru_cache(maxsize=1)
def _rule() -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return (nodes + 1) / 2, weights / 2


def _log_ratio(theta: Tensor, phi: Tensor, kappa: Tensor, dim: int) -> Tensor:
    """Return ``log h(phi) - log h(theta)``."""
    # cos phi - cos theta as a product: it does not cancel for small angles
    turn = -2 * torch.sin((phi - theta) / 2) * torch.sin((phi + theta) / 2)
    ratio = (torch.sin(phi) / torch.sin(theta)).clamp(min=0)  # sin(pi) rounds to either side of 0
    return kappa * turn + torch.xlogy(torch.full_like(ratio, dim - 2), ratio)


def angle_slope(theta: Tensor, kappa: Tensor, dim: int) -> Tensor:
    """Return ``d theta / d kappa`` <= 0 at a fixed value of the distribution function; 0 where theta is 0 or pi."""
    complement = of_kappa(kappa, dim, "complement")
    near = 2 * torch.sin(theta / 2).square() <= complement
    edge = (theta <= 0) | (theta >= math.pi)
    theta = torch.where(edge, torch.full_like(theta, math.pi / 2), theta)
    span = torch.where(near, -theta, math.pi - theta)
    low, high = torch.zeros_like(theta), torch.ones_like(theta)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        inside = _log_ratio(theta, theta + middle * span, kappa, dim) > -_FALL
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    nodes, weights = (torch.from_numpy(part).to(theta.device) for part in _rule())
    reach = (span * high).unsqueeze(-1)
    phi = theta.unsqueeze(-1) + reach * nodes
    excess = (2 * torch.sin(phi / 2).square() - complement.unsqueeze(-1)).abs()
    density = torch.exp(_log_ratio(theta.unsqueeze(-1), phi, kappa.unsqueeze(-1), dim))
    slope = -(excess * density * weights).sum(-1) * reach.squeeze(-1).abs()
    return torch.where(edge, torch.zeros_like(slope), slope)


class _Slope(torch.autograd.Function):
    """The slope as a node of the graph, so that a second derivative in kappa is refused instead of silently wrong."""

    @staticmethod
    def forward(ctx: Any, kappa: Tensor, theta: Tensor, dim: int) -> Tensor:  # noqa: ARG004  # torch's signature
        return angle_slope(theta, kappa, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ARG004  # torch's signature
        message = "von Mises-Fisher: samples can be differentiated only once with respect to kappa."
        raise UnsupportedError(message)


class _FollowKappa(torch.autograd.Function):
    """The angle, with its derivative in the concentration."""

    @staticmethod
    def forward(ctx: Any, kappa: Tensor, theta: Tensor, dim: int) -> Tensor:
        """Return ``theta``; ``kappa`` has its shape."""
        ctx.dim = dim
        ctx.save_for_backward(kappa, theta)
        return theta.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient in ``kappa``."""
        kappa, theta = ctx.saved_tensors
        slope: Tensor = _Slope.apply(kappa, theta, ctx.dim)
        return grads[0] * slope, None, None


def rsample(mu: Tensor, kappa: Tensor, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw directions from von Mises-Fisher distributions, with pathwise gradients.

    The draws equal the draws of ``sample``. A sample turns with its mean direction by the smallest rotation, and its
    angle follows kappa at a fixed value of the distribution function, so the gradient of a mean over samples is
    unbiased. (Reparameterising the proposals of a rejection sampler is biased: their acceptance depends on kappa.)

    Args:
        mu: Mean directions, shape (..., D), D >= 2; normalised here, so none may be zero.
        kappa: Concentrations, finite and >= 0, whose shape broadcasts with the batch shape of ``mu``.
        n_samples: Number of directions to draw from each distribution, >= 1.
        generator: Random generator on the device of ``mu``; torch's default one if not given.

    Returns:
        Unit vectors, shape (n_samples, ..., D), with the dtype and device of ``mu``. They can be differentiated once in
        ``kappa``; a second derivative raises :class:`UnsupportedError`.

    Source: Figurnov, Mohamed and Mnih (2018), Implicit Reparameterization Gradients; the formula for the angle is
    derived for this library.
    """
    m, _ = unit("mu", mu)
    checked = check_kappa(kappa)
    anchor = m.detach()
    drawn = sample(mu.detach(), checked.detach(), n_samples, generator)
    if not (m.requires_grad or checked.requires_grad):
        return drawn
    apart = drawn - anchor
    versine = (apart.square().sum(-1) / 2).clamp(max=2.0)
    tangent = apart + versine.unsqueeze(-1) * anchor
    length = torch.linalg.vector_norm(tangent, dim=-1, keepdim=True)
    tangent = tangent / length.clamp(min=torch.finfo(m.dtype).tiny)
    angle = 2 * torch.asin((versine.double() / 2).sqrt())
    theta = _FollowKappa.apply(checked.double().expand(angle.shape), angle, m.shape[-1]).unsqueeze(-1)
    shift = (torch.sin(theta).to(m.dtype) * tangent) - (2 * torch.sin(theta / 2).square()).to(m.dtype) * anchor
    moved = drawn + (shift - shift.detach())
    # the smallest rotation from `anchor` to `m`; both have equal values, but only `m` has a gradient
    middle = anchor + m
    along = (moved * middle).sum(-1, keepdim=True) / (1 + (anchor * m).sum(-1, keepdim=True))
    turn = 2 * (moved * anchor).sum(-1, keepdim=True) * m - along * middle
    return moved + (turn - turn.detach())
