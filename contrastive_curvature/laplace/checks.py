"""Checks of what laplace-torch stores unchecked: prior, temperature and observation noise."""

from __future__ import annotations

from collections.abc import Collection
from numbers import Real

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, expected


def check_prior(
    argument: str, value: object, dtype: torch.dtype, sizes: Collection[int] | None = None, *, positive: bool = True
) -> None:
    """Refuse what is no prior precision (or mean, where numbers need not be positive).

    Args:
        argument: Its name.
        value: A number, or a tensor of at most one dimension.
        dtype: Of the encoder: what underflows to zero there is refused.
        sizes: Numbers of entries that there is room for, besides one; ``None`` where that is not known yet.
        positive: Whether zero and negative numbers are refused.
    """
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, Real):
            wanted = f"a {'positive' if positive else 'finite'} number or a tensor of them"
            hint = "Wrap it with torch.tensor(...)." if isinstance(value, (list, tuple)) else ""
            raise InputTypeError(expected(argument, wanted, f"a {type(value).__name__}", hint))
        value = torch.tensor(float(value), dtype=dtype)
    if value.is_complex() or value.dtype == torch.bool:
        raise InputTypeError(expected(argument, "real numbers", f"a tensor of {value.dtype}"))
    given = value.detach().to(dtype)
    if given.ndim > 1 or not given.numel():
        raise InputError(expected(argument, "a number or shape (K,), not empty", f"shape {tuple(given.shape)}"))
    if sizes is not None and given.numel() not in {1, *sizes}:
        room = " or ".join(str(size) for size in sorted({1, *sizes}))
        raise InputError(expected(argument, f"{room} entries", f"{given.numel()}"))
    good = given.isfinite() & (given > 0) if positive else given.isfinite()
    if not bool(good.all()):
        wanted = f"positive numbers, finite in {dtype}" if positive else f"finite numbers in {dtype}"
        shown = f"{float(given)}" if given.numel() == 1 else f"{int((~good).sum())} others"
        raise InputError(expected(argument, wanted, shown))
