"""All pairs of vMF distributions: checks, and the quantities that every distance of a pair is made of."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.vmf._checks import check_kappa, unit

__all__ = ["Pairs", "check_same_space", "checked_directions", "make_pairs", "versine", "within"]


class Pairs(NamedTuple):
    """What the distances of B embeddings to C proxies need.

    Attributes:
        versine: One minus the cosine, shape (B, C), float64.
        kappa: Concentrations of the embeddings, shape (B, 1), float64.
        proxy_kappa: Concentrations of the proxies, shape (1, C), float64.
        dim: The dimension D.
        dtype: The dtype of the result.
    """

    versine: Tensor
    kappa: Tensor
    proxy_kappa: Tensor
    dim: int
    dtype: torch.dtype


def checked_directions(name: str, value: object) -> Tensor:
    """Return the unit vectors of a matrix of directions, shape (rows, D).

    Raises:
        InputTypeError: If ``value`` is not a floating-point tensor.
        InputError: If it is not a matrix, D < 2, an entry is not finite, or a row is zero.
    """
    directions, _ = unit(name, value)
    if directions.ndim != 2:
        raise InputError(expected(name, "shape (rows, D)", tuple(directions.shape)))
    return directions


def check_same_space(**tensors: Tensor) -> torch.dtype:
    """Return the common dtype of tensors whose last axis is the dimension D.

    Raises:
        InputError: If the dimensions or the devices differ.
    """
    dims = {name: t.shape[-1] for name, t in tensors.items()}
    if len(set(dims.values())) > 1:
        shown = ", ".join(f"{name} {dim}" for name, dim in dims.items())
        raise InputError(expected("last axes", "one dimension D", shown))
    devices = {str(t.device) for t in tensors.values()}
    if len(devices) > 1:
        raise InputError(expected(", ".join(tensors), "one device", " and ".join(sorted(devices))))
    dtype = next(iter(tensors.values())).dtype
    for t in tensors.values():
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def within(value: Tensor, low: float, high: float) -> Tensor:
    """Clamp the value and not the gradient.

    A cosine that rounds above 1 belongs to two directions that are close, whose gradient is small and not zero.
    """
    return value + (value.clamp(low, high) - value).detach()


def versine(cosine: Tensor) -> Tensor:
    """Return ``1 - cosine`` in [0, 2]."""
    return within(1 - cosine, 0.0, 2.0)


def _row_kappas(name: str, value: object, directions: Tensor) -> Tensor:
    checked = check_kappa(value)
    rows = directions.shape[0]
    if tuple(checked.shape) not in ((), (rows,)):
        wanted = f"shape ({rows},), one for each row of directions, or ()"
        raise InputError(expected(name, wanted, tuple(checked.shape)))
    if checked.device != directions.device:
        raise InputError(expected(name, f"device {directions.device}, that of the directions", str(checked.device)))
    return checked


def make_pairs(mu: object, kappa: object, proxy_mu: object, proxy_kappa: object) -> Pairs:
    """Check the arguments of a distance and pair every embedding with every proxy, by one matrix product.

    Raises:
        InputTypeError: If an argument is not a floating-point tensor.
        InputError: If a shape, a dimension or a device disagrees, a direction is zero or not finite, or a
            concentration is negative or not finite.
    """
    u, p = checked_directions("mu", mu), checked_directions("proxy_mu", proxy_mu)
    dtype = check_same_space(mu=u, proxy_mu=p)
    k, other = _row_kappas("kappa", kappa, u), _row_kappas("proxy_kappa", proxy_kappa, p)
    apart = versine((u.to(dtype) @ p.to(dtype).T).double())
    dtype = torch.promote_types(torch.promote_types(dtype, k.dtype), other.dtype)
    column, row = k.double().expand(u.shape[0])[:, None], other.double().expand(p.shape[0])[None]
    return Pairs(apart, column, row, u.shape[1], dtype)
