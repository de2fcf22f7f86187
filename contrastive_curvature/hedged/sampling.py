"""Samples of Gaussian embeddings and of mixtures of them."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.hedged._checks import check_mixture

__all__ = ["stratified_samples"]


def stratified_samples(
    mean: Tensor, variance: Tensor, n_samples: int = 8, generator: torch.Generator | None = None
) -> Tensor:
    """Draw samples of mixtures of Gaussians, as many of each component.

    A sample is ``mean + sqrt(variance) * noise``, so gradients flow to both. The mean of a function over the samples is
    an unbiased estimate of its mean over the mixture with weights ``1 / C``, with a variance that is no larger than
    that of as many independent samples.

    Args:
        mean: Means of the C components, shape (..., C, D); C = 1 is a single Gaussian.
        variance: Variances > 0 of the same shape: the covariances are diagonal.
        n_samples: Samples K of each mixture, a multiple of C. The default is the document's.
        generator: Random generator on the device of ``mean``; torch's default one if not given.

    Returns:
        Shape (..., K, D), the K / C samples of one component after those of another.

    Raises:
        InputTypeError: An argument has a wrong type.
        InputError: A shape does not fit, the devices differ, an entry is NaN or infinite, a variance is not positive,
            or ``n_samples`` is not a positive multiple of C.

    Source: "Hedged instance embedding", section 2.2. It prints a mixture without weights, whose integral is C; equal
    numbers of samples imply weights of ``1 / C``. Its K = 8 samples are read as those of an image, not of a component.
    """
    centre, spread = check_mixture("mean", mean, "variance", variance)
    validate.count("n_samples", n_samples)
    components = centre.shape[-2]
    if n_samples % components:
        raise InputError(expected("n_samples", f"a multiple of the {components} components", n_samples))
    validate.generator(generator, centre.device)
    centre, spread = (t.repeat_interleave(n_samples // components, -2) for t in (centre, spread))
    dtype = torch.promote_types(centre.dtype, spread.dtype)
    noise = torch.randn(centre.shape, dtype=dtype, device=centre.device, generator=generator)
    return centre + spread.sqrt() * noise
