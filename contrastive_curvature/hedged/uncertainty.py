"""How uncertain an embedding is: the probability that it does not match itself."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.hedged.match import pair_logits
from contrastive_curvature.hedged.sampling import stratified_samples

__all__ = ["self_mismatch"]


def self_mismatch(
    mean: Tensor,
    variance: Tensor,
    a: float | Tensor,
    b: float | Tensor,
    *,
    n_samples: int = 8,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the probability that two independent draws of one embedding do not match.

    The mean of ``1 - sigmoid(-a |z - z'| + b)`` over all pairs of two independent sets of samples. Pairs inside one set
    would hold each sample's pair with itself, whose distance is 0, and would say too little.

    Args:
        mean: Means of the C components, shape (..., C, D); C = 1 is a single Gaussian.
        variance: Variances > 0 of the same shape.
        a: Slope per unit of distance, > 0.
        b: Intercept.
        n_samples: Samples in each of the two sets, a multiple of C.
        generator: Random generator on the device of ``mean``; torch's default one if not given.

    Returns:
        Shape (...), from ``sigmoid(-b)``, which a point has, to 1.

    Raises:
        InputTypeError: An argument has a wrong type.
        InputError: A shape does not fit, the devices differ, an entry is NaN or infinite, a variance or ``a`` is not
            positive, or ``n_samples`` is no multiple of C.

    Source: "Hedged instance embedding", Eq. 9 and 5.
    """
    draws = [stratified_samples(mean, variance, n_samples, generator) for _ in range(2)]
    return torch.sigmoid(-pair_logits(draws[0], draws[1], a, b)).mean((-2, -1))
