"""The density of the von Mises-Fisher distribution: its normaliser, its mean resultant length, its divergence."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.vmf.bessel import bessel_derivatives, bessel_values
from contrastive_curvature.vmf.checks import broadcast_batch, check_dim, check_kappa, same_dim, unit

# name -> (name of the derivative, its sign)
_DERIVATIVE = {
    "log_normalizer": ("ratio", -1.0),
    "gain": ("complement", 1.0),
    "ratio": ("slope", 1.0),
    "complement": ("slope", -1.0),
    "slope": ("curvature", 1.0),
}


class _OfKappa(torch.autograd.Function):
    """A function of kappa whose derivative is another function of kappa, evaluated directly instead of by autograd.

    Autograd through the recurrence would suffer from cancellation for large kappa; see ``bessel``.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(kappa: Tensor, dim: int, name: str) -> Tensor:
        if name in ("slope", "curvature"):
            value: Tensor = getattr(bessel_derivatives(kappa, dim), name)
            return value
        values = bessel_values(kappa, dim)
        if name == "log_normalizer":
            return values.gain - kappa
        value = getattr(values, name)
        return value

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, str], output: Tensor) -> None:  # noqa: ARG004  # torch's signature
        kappa, ctx.dim, ctx.name = inputs
        ctx.save_for_backward(kappa)
        ctx.save_for_forward(kappa)

    @staticmethod
    def _derivative(ctx: Any) -> Tensor:
        if ctx.name not in _DERIVATIVE:
            message = (
                "von Mises-Fisher: the log-normaliser can be differentiated at most three times with respect to kappa."
            )
            raise UnsupportedError(message)
        name, sign = _DERIVATIVE[ctx.name]
        (kappa,) = ctx.saved_tensors
        derivative: Tensor = _OfKappa.apply(kappa, ctx.dim, name)
        return sign * derivative

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * _OfKappa._derivative(ctx), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        tangent: Tensor = tangents[0]
        return tangent * _OfKappa._derivative(ctx)


def of_kappa(kappa: Tensor, dim: int, name: str) -> Tensor:
    """Evaluate one of the functions of ``bessel``, or the log-normaliser minus its value at 0, in float64."""
    value: Tensor = _OfKappa.apply(kappa.double(), dim, name)
    return value


def log_surface(dim: int) -> float:
    """Return ``-log C_D(0)``, the logarithm of the surface area of the unit sphere of R^D."""
    return math.log(2.0) + dim / 2 * math.log(math.pi) - math.lgamma(dim / 2)


def log_normalizer(kappa: Tensor, dim: int) -> Tensor:
    """Return ``log C_D(kappa)``, the log-normaliser of the von Mises-Fisher density.

    ``C_D(kappa) = kappa^(D/2-1) / ((2 pi)^(D/2) I_(D/2-1)(kappa))``. The logarithm can be differentiated three times;
    the first derivative is ``-A_D(kappa)``. For large kappa, ``log_density_at_mode`` gives densities near the mode
    without cancellation.

    Args:
        kappa: Concentrations (dimensionless), any shape, finite and >= 0, any floating dtype.
        dim: Ambient dimension D >= 2.

    Returns:
        The shape, dtype and device of ``kappa``. Computed in float64, with an error relative to max(1, |value|) below
        1e-13 for D up to 4096 and kappa up to 1e8.

    Source: Sra (2012); appendix C of Warburg et al. (2023).
    """
    checked, dim = check_kappa(kappa), check_dim(dim)
    return (of_kappa(checked, dim, "log_normalizer") - log_surface(dim)).to(checked.dtype)


def log_density_at_mode(kappa: Tensor, dim: int) -> Tensor:
    """Return ``log C_D(kappa) + kappa``, the log-density at ``z = mu``, without cancellation.

    Args:
        kappa: Concentrations, any shape, finite and >= 0.
        dim: Ambient dimension D >= 2.

    Returns:
        The shape and dtype of ``kappa``; the derivative is ``1 - A_D(kappa)``, accurate even where A_D rounds to 1.
    """
    checked, dim = check_kappa(kappa), check_dim(dim)
    return (of_kappa(checked, dim, "gain") - log_surface(dim)).to(checked.dtype)


def mean_resultant_length(kappa: Tensor, dim: int) -> Tensor:
    """Return ``A_D(kappa) = I_(D/2)(kappa) / I_(D/2-1)(kappa)``, the norm of the mean of the distribution.

    Args:
        kappa: Concentrations, any shape, finite and >= 0.
        dim: Ambient dimension D >= 2.

    Returns:
        Lengths in [0, 1] with the shape and dtype of ``kappa``; relative error below 1e-13; twice differentiable.

    Source: Sra (2012).
    """
    checked, dim = check_kappa(kappa), check_dim(dim)
    return of_kappa(checked, dim, "ratio").to(checked.dtype)


def log_prob(z: Tensor, mu: Tensor, kappa: Tensor) -> Tensor:
    """Return the log-density at directions, with respect to the surface measure of the unit sphere.

    Computed as ``log_density_at_mode(kappa) - kappa/2 |u - m|^2`` with ``u = z/|z|`` and ``m = mu/|mu|``, which equals
    ``log C_D(kappa) + kappa <u, m>`` and does not cancel for large kappa.

    Args:
        z: Directions, shape (..., D); normalised here, so the gradient with respect to ``z`` is tangential to the
            sphere.
        mu: Mean directions, shape (..., D); normalised here.
        kappa: Concentrations, shape (...), finite and >= 0.

    Returns:
        Log-densities (in nats), with the broadcast batch shape.

    Source: appendix C of Warburg et al. (2023), with its Eq. 41 corrected to ``|z - mu|^2 = 2 - 2 <z, mu>``.
    """
    u, _ = unit("z", z)
    m, _ = unit("mu", mu)
    checked = check_kappa(kappa)
    dim = same_dim(z=u, mu=m)
    broadcast_batch(z=(u, 1), mu=(m, 1), kappa=(checked, 0))
    return log_density_at_mode(checked, dim) - checked / 2 * (u - m).square().sum(-1)


def kl_divergence(mu: Tensor, kappa: Tensor, other_mu: Tensor, other_kappa: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence from (mu, kappa) to (other_mu, other_kappa).

    Computed from ``1 - A_D``, which does not cancel for large kappa.

    Args:
        mu: Mean directions of p, shape (..., D); normalised here.
        kappa: Concentrations of p, shape (...), >= 0.
        other_mu: Mean directions of q, shape (..., D); normalised here.
        other_kappa: Concentrations of q, shape (...), >= 0.

    Returns:
        Divergences (in nats), with the broadcast batch shape; zero up to rounding for equal arguments.
    """
    m, _ = unit("mu", mu)
    other_m, _ = unit("other_mu", other_mu)
    k, other_k = check_kappa(kappa), check_kappa(other_kappa)
    dim = same_dim(mu=m, other_mu=other_m)
    broadcast_batch(mu=(m, 1), kappa=(k, 0), other_mu=(other_m, 1), other_kappa=(other_k, 0))
    at_modes = log_density_at_mode(k, dim) - log_density_at_mode(other_k, dim)
    spread = of_kappa(k, dim, "complement").to(k.dtype)
    turn = (m - other_m).square().sum(-1) / 2
    length = of_kappa(k, dim, "ratio").to(k.dtype)
    return at_modes + (other_k - k) * spread + other_k * length * turn


# D -> the constant, the factor of kappa, the factor of kappa^2
_FITS = {128: (127.0, -0.01909, -0.003355), 512: (868.0, -0.0002662, -0.0009685)}


def log_normalizer_quadratic(kappa: Tensor, dim: int) -> Tensor:
    """Return the document's quadratic fit of ``log C_D(kappa)``, for kappa from 10 to 50.

    Outside this range the fit is wrong: it falls like ``-kappa^2``, the log-normaliser like ``-kappa``.

    Args:
        kappa: Concentrations (dimensionless), any shape, finite and >= 0.
        dim: Ambient dimension, 128 or 512, the two dimensions in the document.

    Returns:
        The fitted values, with the shape and dtype of ``kappa``.

    Raises:
        UnsupportedError: If ``dim`` is not one of the two.

    Source: Eq. 12-13.
    """
    checked, dim = check_kappa(kappa), check_dim(dim)
    if dim not in _FITS:
        raise UnsupportedError("dim", "128 or 512", dim, "log_normalizer is exact for every dimension.")
    constant, linear, quadratic = _FITS[dim]
    return constant + checked * (linear + quadratic * checked)
