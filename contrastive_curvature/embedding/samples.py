"""Samples of raw outputs: from Gaussians, and their covariance."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gaussian_samples", "sample_covariance"]


def sample_covariance(samples: Tensor) -> Tensor:
    """Sample covariance, shape (B, D, D), of samples of shape (S, B, D)."""
    centred = (samples - samples.mean(0)).permute(1, 2, 0)
    return centred @ centred.mT / (samples.shape[0] - 1)


def gaussian_samples(
    mean: Tensor, variance: Tensor | None, covariance: Tensor | None, n_samples: int, generator: torch.Generator | None
) -> Tensor:
    """Draw from independent Gaussians.

    Args:
        mean: Shape (B, D).
        variance: Shape (B, D), or ``None``.
        covariance: Shape (B, D, D), positive semidefinite (it may be singular), or ``None``.
        n_samples: Number S of samples.
        generator: Random generator; torch's default one if not given.

    Returns:
        Shape (S, B, D), of the dtype of the mean.
    """
    # There is no decomposition in half precision.
    wide = torch.promote_types(mean.dtype, torch.float32)
    noise = torch.randn(n_samples, *mean.shape, dtype=wide, device=mean.device, generator=generator)
    if covariance is None:
        if variance is None:
            msg = "a variance or a covariance is needed"
            raise TypeError(msg)
        return (mean + noise * variance.to(wide).sqrt()).to(mean.dtype)
    values, vectors = torch.linalg.eigh(covariance.to(wide))
    root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    return (mean + torch.einsum("bde,sbe->sbd", root, noise)).to(mean.dtype)
