"""A sketch of a matrix of second moments ``A`` (F, F): its product with a fixed test matrix, and its trace.

Both are linear in ``A``, so sketches of batches, of data sets and of discounted sums add up as the matrices would. No
(F, F) matrix is formed where the sketch is smaller. The leading eigenvectors are recovered by
:mod:`contrastive_curvature.structures.nystrom`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from contrastive_curvature.network.full_precision import full_precision

MOST_RANK = 64
"""Largest rank that is chosen from the spectrum, above :data:`EXACT_WIDTH` (``docs/defaults.md``)."""

EXACT_WIDTH = 2048
"""Up to so many features all eigenvectors are kept, which takes a few seconds. Small eigenvalues count: on 512 features
of faces and 256 of sentences, rank 64 ranks worse than all (``docs/defaults.md``)."""

_SPARE = 8


def sketch_size(width: int, rank: int | None) -> int:
    """Return the number of columns of a sketch: twice the rank and a few more, as Tropp et al. (2017) advise.

    It is F, for the matrix itself, where the sketch would have half as many columns or more, and without a rank up to
    :data:`EXACT_WIDTH`.
    """
    if rank is None and width <= EXACT_WIDTH:
        return width
    size = 2 * (MOST_RANK if rank is None else rank) + _SPARE
    return width if 2 * size >= width else size


@functools.lru_cache(maxsize=4)
def sketch_matrix(width: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the test matrix (F, size) of a sketch: independent Gaussian entries of variance 1 / F, always the same.

    The entries are those of float64 on the CPU, rounded, so that devices agree; they are not to be changed.
    """
    # Drawing a million numbers takes longer than a training step's product with them, hence the cache.
    with torch.inference_mode(mode=False):
        generator = torch.Generator("cpu").manual_seed(0)
        drawn = torch.randn(width, size, generator=generator, dtype=torch.float64, device="cpu")
        return (drawn / width**0.5).to(dtype=dtype, device=device)


@full_precision
def sketch_moment(features: Tensor, size: int) -> list[Tensor]:
    """Sketch ``features^T features`` (F, F) in ``size`` columns.

    Returns:
        The product with the test matrix (F, size), or the matrix itself where ``size`` is F; and the trace, shape (1,).
    """
    width = features.shape[1]
    trace = features.square().sum().reshape(1)
    if size == width:
        return [features.T @ features, trace]
    return [features.T @ (features @ sketch_matrix(width, size, features.dtype, features.device)), trace]
