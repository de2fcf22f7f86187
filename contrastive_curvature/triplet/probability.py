"""The probability that a triplet of Gaussian embeddings keeps its margin.

The logarithm of the normal distribution function has derivatives here that are accurate far into the tail.
``torch.special.log_ndtr`` has the right value. But its gradient ``exp(-log_ndtr(z) - z^2 / 2) / sqrt(2 pi)`` subtracts
two numbers of size z^2 / 2: at z = -1e4 in float32 it is 6.5 times too large, at z = -1e10 in float64 it is infinite.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.triplet.gaussian_moments import TauMoments, check_triplet, moments_of

# Beyond -_TAIL the continued fraction is used; with _LEVELS levels its error is below 1e-15, measured with mpmath.
_TAIL = 5.0
_LEVELS = 40


def _fraction(z: Tensor) -> Tensor:
    """Return ``z + phi(z) / Phi(z)`` for z <= -_TAIL: with x = -z, ``1 / (x + 2 / (x + 3 / (x + ...)))``."""
    x = (-z).clamp(min=_TAIL)
    rest = torch.zeros_like(x)
    for level in range(_LEVELS, 1, -1):
        rest = level / (x + rest)
    return 1 / (x + rest)


class _Tail(torch.autograd.Function):
    """``log``: log Phi(z). ``hazard``: its derivative h = phi(z) / Phi(z). ``excess``: z + h, which would cancel."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, name: str) -> Tensor:
        if name == "log":
            value: Tensor = torch.special.log_ndtr(z)
            return value
        hazard = math.sqrt(2 / math.pi) / torch.special.erfcx(z / -math.sqrt(2))
        excess = torch.where(z < -_TAIL, _fraction(z), z + hazard)
        return excess if name == "excess" else torch.where(z < -_TAIL, excess - z, hazard)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:  # noqa: ARG004  # torch's signature
        z, ctx.name = inputs
        ctx.save_for_backward(z)
        ctx.save_for_forward(z)

    @staticmethod
    def _derivative(ctx: Any) -> Tensor:
        (z,) = ctx.saved_tensors
        if ctx.name == "excess":
            message = "log_normal_cdf can be differentiated at most twice."
            raise UnsupportedError(message)
        hazard: Tensor = _Tail.apply(z, "hazard")
        return hazard if ctx.name == "log" else -hazard * _Tail.apply(z, "excess")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * _Tail._derivative(ctx), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        tangent: Tensor = tangents[0]
        return tangent * _Tail._derivative(ctx)


def _log_cdf(z: Tensor) -> Tensor:
    """Return ``log Phi(z)`` for a float64 tensor, unchecked."""
    value: Tensor = _Tail.apply(z, "log")
    return value


def log_normal_cdf(z: Tensor) -> Tensor:
    """Return ``log Phi(z)``, the logarithm of the standard normal distribution function.

    Args:
        z: Finite numbers, any shape, any floating dtype.

    Returns:
        Values <= 0 with the shape and dtype of ``z`` (float32 for half precision), computed in float64. The
        relative error of value, first derivative ``phi(z) / Phi(z)`` and second derivative is below 3e-13 for z from
        -1e150 to 37; above, all three go to zero and underflow.

    Raises:
        InputError: An entry is NaN or infinite, or so far below zero that the value, about ``-z^2 / 2``, overflows the
            dtype.
        UnsupportedError: A third derivative is requested.
    """
    checked = validate.real("z", z)
    value = _log_cdf(checked.double()).to(checked.dtype)
    if not bool(torch.isfinite(value).all()):
        limit = -math.sqrt(2 * torch.finfo(checked.dtype).max)
        raise InputError("z", f"entries above {limit:.3g}, where {checked.dtype} overflows", float(checked.min()))
    return value


def log_probability_with(moments: TauMoments, margin: float) -> Tensor:
    """Return ``log P(tau < -margin)`` for a normal distribution of tau with these moments."""
    mean, variance = moments
    certain = int((variance == 0).sum())
    if certain:
        hint = "Without any variance the probability is 0 or 1, and has no useful gradient."
        raise InputError("variances", "Var[tau] > 0", f"{certain} triplets with Var[tau] = 0", hint)
    return _log_cdf(-(mean + margin) / variance.sqrt())


def log_probability(
    anchor: tuple[Tensor, Tensor],
    positive: tuple[Tensor, Tensor],
    negative: tuple[Tensor, Tensor],
    margin: float = 0.0,
) -> Tensor:
    """Return ``log P(|a - p|^2 + margin < |a - n|^2)`` for independent Gaussian embeddings.

    It is ``log Phi(-(margin + E[tau]) / sd[tau])``: the normal distribution with the exact moments of tau. Nothing is
    added inside the logarithm, so a badly wrong triplet keeps its gradient.

    Args:
        anchor: Mean (..., D) and variance (..., D) or (..., 1), the latter >= 0.
        positive: The same for the embedding that should be close.
        negative: The same for the embedding that should be far.
        margin: ``m >= 0``, in squared units of the embedding.

    Returns:
        Log-probabilities (in nats) with the broadcast batch shape; twice differentiable.

    Raises:
        InputError: A moment overflows, or a variance of tau is zero.

    Source: poster of Warburg et al. (2021), steps 3 to 6. Step 5 and the supplement's listing 2 (line 19) leave out a
    part; see ``benchmarks/results/other_methods.md``.
    """
    margin = validate.number("margin", margin)
    embeddings, dtype = check_triplet(anchor, positive, negative)
    return log_probability_with(moments_of(*embeddings), margin).to(dtype)
