"""How probable it is that a triplet of Gaussian embeddings keeps its margin."""

from __future__ import annotations

from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.triplet._checks import Triplet, check_triplet
from contrastive_curvature.triplet.moments import TauMoments, moments_of
from contrastive_curvature.triplet.normal_tail import log_cdf

__all__ = ["log_probability", "log_probability_of", "log_probability_with"]


def log_probability_of(triplet: Triplet, margin: float) -> Tensor:
    """Return ``log P(tau < -margin)`` for checked arguments, in float64.

    Raises:
        InputError: A moment overflows, or a variance of tau is zero.
    """
    return log_probability_with(moments_of(triplet), margin)


def log_probability_with(moments: TauMoments, margin: float) -> Tensor:
    """Return ``log P(tau < -margin)`` for a normal distribution of tau with these moments.

    Raises:
        InputError: A variance of tau is zero.
    """
    mean, variance = moments
    certain = int((variance == 0).sum())
    if certain:
        hint = "Without any variance the probability is 0 or 1, and has no useful gradient."
        raise InputError(expected("variances", "Var[tau] > 0", f"{certain} triplets with Var[tau] = 0", hint))
    return log_cdf(-(mean + margin) / variance.sqrt())


def log_probability(
    anchor: tuple[Tensor, Tensor],
    positive: tuple[Tensor, Tensor],
    negative: tuple[Tensor, Tensor],
    margin: float = 0.0,
) -> Tensor:
    """Return ``log P(|a - p|^2 + margin < |a - n|^2)`` for independent Gaussian embeddings.

    ``log Phi(-(margin + E[tau]) / sd[tau])``: the exact moments of tau, and the normal distribution with them. Nothing
    is added inside the logarithm, so that a triplet that is badly wrong keeps its gradient.

    Args:
        anchor: Mean (..., D) and variance (..., D) or (..., 1), the latter >= 0.
        positive: The same for the embedding that should be close.
        negative: The same for the embedding that should be far.
        margin: ``m >= 0``, in squared units of the embedding.

    Returns:
        Log-probabilities (in nats) with the broadcast batch shape; twice differentiable.

    Raises:
        InputTypeError: An embedding is not a tuple of two floating-point tensors, or ``margin`` is no number.
        InputError: ``margin`` is negative or not finite, a shape does not fit, the dimensions or the devices differ,
            the batch shapes do not broadcast, an entry is NaN or infinite, a variance is negative, a moment overflows,
            or a variance of tau is zero.

    Source: poster of Warburg et al. (2021), steps 3 to 6. Step 5 and the supplement's listing 2 (line 19) leave out a
    part; see ``docs/bayesian_triplet.md``.
    """
    margin = validate.number("margin", margin)
    triplet = check_triplet(anchor, positive, negative)
    return log_probability_of(triplet, margin).to(triplet.dtype)
