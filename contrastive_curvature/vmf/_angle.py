"""How the angle of a von Mises-Fisher sample follows the concentration at a fixed value of its distribution function.

The angle theta from the mean direction has the density ``h(theta) ~ exp(kappa cos theta) sin^(D-2) theta``. Implicit
reparameterisation (Figurnov et al. 2018) holds ``F(theta; kappa)`` fixed:

    d theta / d kappa = -(1 / h(theta)) * integral over [0, theta] of (cos phi - A) h(phi) d phi,

and the integral over [theta, pi] of ``(A - cos phi) h(phi)`` is the same number. Of the two, the side without a change
of sign is taken, so that nothing cancels. It is cut where h has fallen by ``exp(-40)``, for a Gauss-Legendre rule.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.vmf.normalizer import of_kappa

__all__ = ["FollowKappa", "angle_slope"]

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
    """Return ``d theta / d kappa`` at a fixed value of the distribution function.

    Args:
        theta: Angles in [0, pi], any shape, float64.
        kappa: Concentrations >= 0, the same shape, float64.
        dim: Ambient dimension D >= 2.

    Returns:
        Slopes <= 0 with the shape of ``theta``; 0 where theta is 0 or pi.
    """
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
    """The slope as a node of the graph, so that a second derivative by kappa is refused and not silently wrong."""

    @staticmethod
    def forward(ctx: Any, kappa: Tensor, theta: Tensor, dim: int) -> Tensor:  # noqa: ARG004  # torch's signature
        return angle_slope(theta, kappa, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ARG004  # torch's signature
        message = "von Mises-Fisher: samples can be differentiated only once with respect to kappa."
        raise UnsupportedError(message)


class FollowKappa(torch.autograd.Function):
    """The angle itself, with its derivative by the concentration."""

    @staticmethod
    def forward(ctx: Any, kappa: Tensor, theta: Tensor, dim: int) -> Tensor:
        """Return ``theta``; ``kappa`` has its shape."""
        ctx.dim = dim
        ctx.save_for_backward(kappa, theta)
        return theta.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient by ``kappa``."""
        kappa, theta = ctx.saved_tensors
        slope: Tensor = _Slope.apply(kappa, theta, ctx.dim)
        return grads[0] * slope, None, None
