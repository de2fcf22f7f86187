"""Von Mises-Fisher samples through which gradients reach the mean direction and the concentration."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.vmf._angle import FollowKappa
from contrastive_curvature.vmf._checks import check_kappa, unit
from contrastive_curvature.vmf.sampling import sample

__all__ = ["rsample"]


def rsample(mu: Tensor, kappa: Tensor, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw directions from von Mises-Fisher distributions, with pathwise gradients.

    The draws are those of ``sample``. A sample turns with its mean direction by the smallest rotation, and its angle
    follows kappa at a fixed value of the distribution function. So the gradient of a mean over samples is an unbiased
    estimate of the gradient of the expectation. Reparameterising the proposals of a rejection sampler instead, as is
    common, leaves out that their acceptance depends on kappa, and is biased.

    Args:
        mu: Mean directions, shape (..., D), D >= 2; normalised here, so none may be zero.
        kappa: Concentrations, finite and >= 0, whose shape broadcasts with the batch shape of ``mu``.
        n_samples: Number of directions to draw from each distribution, >= 1.
        generator: Random generator on the device of ``mu``; torch's default one if not given.

    Returns:
        Unit vectors, shape (n_samples, ..., D), with the dtype and device of ``mu``. They can be differentiated once by
        ``kappa``; a second time raises :class:`UnsupportedError`.

    Raises:
        InputTypeError: If ``mu`` or ``kappa`` is not a floating-point tensor, or ``n_samples`` not an int.
        InputError: If ``n_samples`` < 1, a mean direction is zero or not finite, ``kappa`` is negative or not finite,
            the shapes do not broadcast, or the devices of the arguments differ.

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
    theta = FollowKappa.apply(checked.double().expand(angle.shape), angle, m.shape[-1]).unsqueeze(-1)
    shift = (torch.sin(theta).to(m.dtype) * tangent) - (2 * torch.sin(theta / 2).square()).to(m.dtype) * anchor
    moved = drawn + (shift - shift.detach())
    # the smallest rotation that takes `anchor` to `m`, which are equal but for the gradient
    middle = anchor + m
    along = (moved * middle).sum(-1, keepdim=True) / (1 + (anchor * m).sum(-1, keepdim=True))
    turn = 2 * (moved * anchor).sum(-1, keepdim=True) * m - along * middle
    return moved + (turn - turn.detach())
