"""Input checks of uncertain embeddings, samples and the numbers of the match probability."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.vmf._checks import check_finite, check_real

__all__ = [
    "check_matches",
    "check_mixture",
    "check_points",
    "check_slope",
    "reduced",
]


def _scalar(argument: str, value: object) -> float:
    if isinstance(value, Tensor):
        if value.ndim or not value.is_floating_point():
            came = f"{value.dtype} of shape {tuple(value.shape)}"
            raise InputError(expected(argument, "a number or a floating-point tensor without axes", came))
        found = value.item()
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputTypeError(expected(argument, "a number or a tensor", f"a {type(value).__name__}"))
    else:
        found = float(value)
    if not math.isfinite(found):
        raise InputError(expected(argument, "a finite number", found))
    return found


def check_slope(a: object, b: object) -> None:
    """Refuse parameters of the match probability that are no numbers, and a slope that is not positive.

    Raises:
        InputTypeError: One is not a number or a tensor.
        InputError: One is not finite or has axes, or ``a`` is not positive.
    """
    if _scalar("a", a) <= 0:
        hint = "A network's output becomes positive by torch.nn.functional.softplus; MatchParameters has one."
        raise InputError(expected("a", "a number > 0", _scalar("a", a), hint))
    _scalar("b", b)


def check_points(name: str, value: object, *, samples: bool = False) -> Tensor:
    """Return points (..., D), or samples (..., K, D), that are finite; half precision is converted to float32.

    Raises:
        InputTypeError: ``value`` is not a floating-point tensor.
        InputError: The shape is wrong, or an entry is NaN or infinite.
    """
    points = check_real(name, value)
    if points.ndim < 1 + samples or points.shape[-1] < 1 or (samples and points.shape[-2] < 1):
        wanted = "shape (..., K, D) with K >= 1 and D >= 1" if samples else "shape (..., D) with D >= 1"
        raise InputError(expected(name, wanted, tuple(points.shape)))
    check_finite(name, points)
    return points


def check_mixture(mean_name: str, mean: object, variance_name: str, variance: object) -> tuple[Tensor, Tensor]:
    """Return means and variances of a mixture; half precision is converted to float32.

    Args:
        mean_name: Name of the means, for the error messages.
        mean: Means of the components, shape (..., C, D), C >= 1, D >= 1.
        variance_name: Name of the variances, for the error messages.
        variance: Variances > 0 of the same shape.

    Raises:
        InputTypeError: One is not a floating-point tensor.
        InputError: The shapes are wrong or differ, the devices differ, an entry is NaN or infinite, or a variance is
            not positive.
    """
    centre, spread = check_real(mean_name, mean), check_real(variance_name, variance)
    if centre.ndim < 2 or min(centre.shape[-2:]) < 1:
        hint = "A single Gaussian is a mixture of one component: mean.unsqueeze(-2)."
        raise InputError(expected(mean_name, "shape (..., C, D) with C >= 1 and D >= 1", tuple(centre.shape), hint))
    if spread.shape != centre.shape:
        raise InputError(expected(variance_name, f"shape {tuple(centre.shape)}", tuple(spread.shape)))
    if centre.device != spread.device:
        raise InputError(expected(variance_name, f"a tensor on {centre.device}", f"one on {spread.device}"))
    check_finite(mean_name, centre)
    check_finite(variance_name, spread)
    if bool((spread <= 0).any()):
        hint = "A network's output becomes a variance by torch.nn.functional.softplus or torch.exp."
        raise InputError(expected(variance_name, "variances > 0", float(spread.min()), hint))
    return centre, spread


def check_matches(matches: object, batch: torch.Size, device: torch.device) -> Tensor:
    """Return the indicator of matching pairs, expanded to the shape ``batch`` of the pairs.

    Raises:
        InputTypeError: It is not a tensor of booleans.
        InputError: Its shape does not broadcast to ``batch``, or it is on another device.
    """
    if not isinstance(matches, Tensor) or matches.dtype != torch.bool:
        came = str(matches.dtype) if isinstance(matches, Tensor) else f"a {type(matches).__name__}"
        raise InputTypeError(expected("matches", "a tensor of booleans", came, "Compare labels: labels1 == labels2."))
    if matches.device != device:
        raise InputError(expected("matches", f"a tensor on {device}", f"one on {matches.device}"))
    try:
        fits = torch.broadcast_shapes(matches.shape, batch) == batch
    except RuntimeError:
        fits = False
    if not fits:
        raise InputError(expected("matches", f"a shape that broadcasts to {tuple(batch)}", tuple(matches.shape)))
    return matches.expand(batch)


def reduced(losses: Tensor, reduction: str) -> Tensor:
    """Return the mean or the sum of the losses, or the losses themselves.

    Raises:
        InputError: ``reduction`` is unknown, or it is the mean of no losses.
    """
    validate.choice("reduction", reduction, ("mean", "sum", "none"))
    if reduction == "none":
        return losses
    if reduction == "mean" and not losses.numel():
        raise InputError(expected("pairs", "at least one pair", "none", 'Or reduction="sum".'))
    return losses.mean() if reduction == "mean" else losses.sum()
