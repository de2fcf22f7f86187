"""Kullback-Leibler divergence of a von Mises-Fisher distribution to the uniform distribution on the sphere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.vmf._checks import check_dim, check_kappa
from contrastive_curvature.vmf.normalizer import of_kappa

__all__ = ["kl_to_uniform", "kl_to_uniform_of"]

_SERIES_TERMS = 20  # kappa^2 <= 2 D below, so that term k is at most 1 / k!


def _log_growth(kappa: Tensor, dim: int) -> Tensor:
    """Return ``log C_D(0) - log C_D(kappa)`` for kappa^2 <= 2 D, as a sum of positive terms."""
    quarter = kappa.square() / 4
    term, total = torch.ones_like(kappa), torch.zeros_like(kappa)
    for k in range(1, _SERIES_TERMS + 1):
        term = term * quarter / (k * (dim / 2 + k - 1))
        total = total + term
    return torch.log1p(total)


class _Divergence(torch.autograd.Function):
    """The divergence, whose derivative is ``kappa A'(kappa)``: autograd through the value would cancel."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kappa: Tensor, dim: int) -> Tensor:
        # Two forms of one value: the first cancels by a factor of two at most, but has a limited range; the second
        # loses every digit as kappa goes to zero.
        few = kappa.square() <= 2 * dim
        small = torch.where(few, kappa, torch.zeros_like(kappa))
        near = kappa * of_kappa(kappa, dim, "ratio") - _log_growth(small, dim)
        return torch.where(few, near, of_kappa(kappa, dim, "gain") - kappa * of_kappa(kappa, dim, "complement"))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:  # noqa: ARG004  # torch's signature
        kappa, ctx.dim = inputs
        ctx.save_for_backward(kappa)
        ctx.save_for_forward(kappa)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (kappa,) = ctx.saved_tensors
        return grads[0] * kappa * of_kappa(kappa, ctx.dim, "slope"), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        (kappa,) = ctx.saved_tensors
        tangent: Tensor = tangents[0]
        return tangent * kappa * of_kappa(kappa, ctx.dim, "slope")


def kl_to_uniform_of(kappa: Tensor, dim: int) -> Tensor:
    """Return the divergence for checked arguments, in float64."""
    value: Tensor = _Divergence.apply(kappa.double(), dim)
    return value


def kl_to_uniform(kappa: Tensor, dim: int) -> Tensor:
    """Return the Kullback-Leibler divergence of a von Mises-Fisher distribution to the uniform one.

    ``kappa A_D(kappa) + log C_D(kappa) - log C_D(0)``, with the normaliser ``C_D`` and the mean resultant length
    ``A_D`` of :mod:`contrastive_curvature.vmf`. It does not depend on the mean direction, is 0 at kappa = 0, close to
    ``kappa^2 / (2 D)`` for small kappa, and grows like ``(D - 1)/2 log kappa`` for large kappa.

    Args:
        kappa: Concentrations, any shape, finite and >= 0, any floating dtype.
        dim: Ambient dimension D >= 2.

    Returns:
        Divergences >= 0 (in nats) with the shape and dtype of ``kappa``, computed in float64 with a relative error
        below 1e-12 for D up to 4096 and kappa up to 1e5; three times differentiable.

    Raises:
        InputTypeError: ``kappa`` is not a floating-point tensor, or ``dim`` not an int.
        InputError: ``kappa`` is negative, NaN or infinite, or ``dim`` < 2.

    Source: what ``kappa - D log 2`` in listing 2 (line 42) of the supplement of Warburg et al. (2021) stands for.
    """
    checked, dim = check_kappa(kappa), check_dim(dim)
    return kl_to_uniform_of(checked, dim).to(checked.dtype)
