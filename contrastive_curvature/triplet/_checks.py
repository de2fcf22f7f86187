"""Input checks of Gaussian embeddings."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.vmf._checks import broadcast_batch, check_finite, check_real

__all__ = ["Gaussian", "Triplet", "check_gaussian", "check_triplet"]


class Gaussian(NamedTuple):
    """A checked embedding in float64: mean (..., D), variance (..., D) or (..., 1)."""

    mean: Tensor
    variance: Tensor
    dtype: torch.dtype
    """The dtype of results."""


class Triplet(NamedTuple):
    """Three checked embeddings of one dimension, whose batch shapes broadcast."""

    anchor: Gaussian
    positive: Gaussian
    negative: Gaussian
    dtype: torch.dtype


def check_gaussian(mean_name: str, mean: object, variance_name: str, variance: object) -> Gaussian:
    """Return an embedding in float64.

    Args:
        mean_name: Name of the mean, for the error messages.
        mean: Means, shape (..., D), D >= 1.
        variance_name: Name of the variance, for the error messages.
        variance: Variances >= 0, shape (..., D) or (..., 1) with the batch shape of the mean.

    Raises:
        InputTypeError: One is not a floating-point tensor.
        InputError: A shape does not fit, the devices differ, an entry is NaN or infinite, or a variance is negative.
    """
    centre, spread = check_real(mean_name, mean), check_real(variance_name, variance)
    if centre.ndim < 1 or centre.shape[-1] < 1:
        raise InputError(expected(mean_name, "shape (..., D) with D >= 1", tuple(centre.shape)))
    diagonal, isotropic = tuple(centre.shape), (*centre.shape[:-1], 1)
    if tuple(spread.shape) not in (diagonal, isotropic):
        wanted = f"shape {diagonal} (diagonal)" + (f" or {isotropic} (isotropic)" if diagonal != isotropic else "")
        raise InputError(expected(variance_name, wanted, tuple(spread.shape)))
    if centre.device != spread.device:
        raise InputError(expected(variance_name, f"a tensor on {centre.device}", f"one on {spread.device}"))
    check_finite(mean_name, centre)
    check_finite(variance_name, spread)
    if bool((spread < 0).any()):
        hint = "A network's output becomes a variance by torch.nn.functional.softplus or torch.exp."
        raise InputError(expected(variance_name, "variances >= 0", float(spread.min()), hint))
    return Gaussian(centre.double(), spread.double(), torch.promote_types(centre.dtype, spread.dtype))


def _pair(name: str, value: object) -> Gaussian:
    if not isinstance(value, tuple) or len(value) != 2:
        received = f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
        raise InputTypeError(expected(name, "a tuple (mean, variance) of two tensors", received))
    return check_gaussian(f"mean of {name}", value[0], f"variance of {name}", value[1])


def check_triplet(anchor: object, positive: object, negative: object) -> Triplet:
    """Return three embeddings in float64.

    Raises:
        InputTypeError: One is not a tuple of two floating-point tensors.
        InputError: One is not a Gaussian embedding (see :func:`check_gaussian`), the dimensions or the devices differ,
            or the batch shapes do not broadcast.
    """
    a, p, n = _pair("anchor", anchor), _pair("positive", positive), _pair("negative", negative)
    dims = {"anchor": a.mean.shape[-1], "positive": p.mean.shape[-1], "negative": n.mean.shape[-1]}
    if len(set(dims.values())) > 1:
        shown = ", ".join(f"{name} {dim}" for name, dim in dims.items())
        raise InputError(expected("anchor, positive, negative", "one dimension D", shown))
    broadcast_batch(anchor=(a.mean, 1), positive=(p.mean, 1), negative=(n.mean, 1))
    return Triplet(a, p, n, torch.promote_types(a.dtype, torch.promote_types(p.dtype, n.dtype)))
