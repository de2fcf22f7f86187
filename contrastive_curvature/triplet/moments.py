"""Mean and variance of the difference of two squared distances between Gaussian embeddings."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.triplet._checks import Triplet, check_triplet

__all__ = ["TauMoments", "moments_of", "tau_moments"]


class TauMoments(NamedTuple):
    """The first two moments of tau, each with the batch shape.

    Attributes:
        mean: ``E[tau]``, in squared units of the embedding; negative where the anchor is closer to the positive.
        variance: ``Var[tau]``, in fourth powers of these units.
    """

    mean: Tensor
    variance: Tensor


def _representable(moments: TauMoments) -> TauMoments:
    bad = sum(int((~torch.isfinite(moment)).sum()) for moment in moments)
    if bad:
        hint = f"{moments.mean.dtype} overflows. Scale the embeddings down."
        raise InputError(expected("anchor, positive, negative", "finite moments of tau", f"{bad} infinite", hint))
    return moments


def moments_of(triplet: Triplet) -> TauMoments:
    """Return the moments of tau for checked embeddings, in float64.

    Raises:
        InputError: A moment overflows.
    """
    (a, a_var, _), (p, p_var, _), (n, n_var, _) = triplet[:3]
    # In differences of the means alone, every term of the variance is >= 0, and far embeddings close to each other
    # lose nothing. The printed forms, polynomials in the means, cancel.
    to_positive, to_negative, apart = p - a, n - a, p - n
    mean = (apart * (to_positive + to_negative) + (p_var - n_var)).sum(-1)
    first_order = to_positive.square() * p_var + to_negative.square() * n_var + apart.square() * a_var
    second_order = p_var.square() + n_var.square() + 2 * a_var * (p_var + n_var)
    return _representable(TauMoments(mean, (4 * first_order + 2 * second_order).sum(-1)))


def tau_moments(
    anchor: tuple[Tensor, Tensor], positive: tuple[Tensor, Tensor], negative: tuple[Tensor, Tensor]
) -> TauMoments:
    """Return mean and variance of ``tau = |a - p|^2 - |a - n|^2`` for independent Gaussian embeddings.

    Per dimension, with the differences of the means ``u = p - a``, ``v = n - a``, ``u - v = p - n``, and summed over
    the dimensions (an isotropic variance counts in each of them):

        E[tau]   = (u - v)(u + v) + s_p - s_n
        Var[tau] = 4 [u^2 s_p + v^2 s_n + (u - v)^2 s_a] + 2 s_p^2 + 2 s_n^2 + 4 s_a (s_p + s_n)

    Both are exact for any D; only the normal distribution with these moments is an approximation.

    Args:
        anchor: Mean (..., D) and variance (..., D) or (..., 1), the latter >= 0.
        positive: The same for the embedding that should be close.
        negative: The same for the embedding that should be far.

    Returns:
        The moments, each with the broadcast batch shape.

    Raises:
        InputTypeError: An embedding is not a tuple of two floating-point tensors.
        InputError: A shape does not fit, the dimensions or the devices differ, the batch shapes do not broadcast, an
            entry is NaN or infinite, a variance is negative, or a moment overflows.

    Source: Eq. 5 and Eq. 17, 18 and 26 in Eq. 7 of the supplement of Warburg et al. (2021), rearranged. The variance on
    their poster (step 6) has two wrong signs.
    """
    triplet = check_triplet(anchor, positive, negative)
    mean, variance = moments_of(triplet)
    return _representable(TauMoments(mean.to(triplet.dtype), variance.to(triplet.dtype)))
