"""Checks of the mean, the variance and the covariance of embeddings, with tolerances for rounding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = [
    "InvalidRowsError",
    "check_all_finite",
    "check_destination",
    "check_draw",
    "check_floats",
    "check_mean",
    "check_semidefinite",
    "check_spread",
    "check_typical_norm",
]


class InvalidRowsError(InputError):
    """Some inputs of a batch have no finite embedding.

    Args:
        message: The message.
        rows: Which, booleans, shape (B,).
    """

    def __init__(self, message: str, rows: Tensor) -> None:
        super().__init__(message)
        self.rows = rows

    def __reduce__(self) -> tuple[type[InvalidRowsError], tuple[str, Tensor]]:
        """What copies and pickles are made from."""
        return type(self), (str(self), self.rows)


def check_floats(name: str, value: object, wanted: str) -> None:
    """Refuse anything but a dense floating-point tensor.

    Args:
        name: Name of the argument.
        value: The argument.
        wanted: The shape that is wanted, for the error message.

    Raises:
        InputTypeError: ``value`` is anything else.
    """
    if not isinstance(value, Tensor):
        raise InputTypeError(expected(name, f"a torch.Tensor, {wanted}", f"a {type(value).__name__}"))
    validate.dense(name, value)
    if not value.is_floating_point():
        raise InputTypeError(expected(name, "a floating-point tensor", f"{value.dtype}", "Call .float() on it."))


def check_all_finite(name: str, value: Tensor) -> None:
    """Refuse NaN and infinity.

    Raises:
        InputError: An entry is NaN or infinite.
    """
    bad = int((~value.detach().isfinite()).sum())
    if bad:
        raise InputError(expected(name, "finite numbers", f"{bad} of {value.numel()} NaN or infinite"))


def check_mean(mean: object) -> None:
    """Refuse anything but a mean of raw outputs.

    Raises:
        InputTypeError: ``mean`` is not a floating-point tensor.
        InputError: The shape is not (B, D) with D >= 2, an entry is not finite, or a row is zero.
    """
    wanted = "shape (B, D) with D >= 2"
    check_floats("raw_mean", mean, wanted)
    if not isinstance(mean, Tensor) or mean.ndim != 2 or mean.shape[1] < 2:
        raise InputError(expected("raw_mean", wanted, f"shape {tuple(getattr(mean, 'shape', ()))}"))
    check_all_finite("raw_mean", mean)
    zero = (mean.detach() == 0).all(1)
    if bool(zero.any()):
        rows = zero.nonzero().flatten()[:5].tolist()
        raise InputError(expected("raw_mean", "rows that are not zero", f"zero rows {rows}", "Zero has no direction."))


def check_spread(name: str, spread: object, mean: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a variance or a covariance that does not fit the mean.

    Args:
        name: Name of the argument.
        spread: The variance or covariance.
        mean: The mean, shape (B, D).
        shape: The shape that the spread must have.

    Raises:
        InputTypeError: ``spread`` is not a floating-point tensor.
        InputError: The shape, dtype or device differs from what the mean requires, or an entry is not finite.
    """
    wanted = f"shape {tuple(shape)} to fit raw_mean {tuple(mean.shape)}"
    check_floats(name, spread, wanted)
    if not isinstance(spread, Tensor) or tuple(spread.shape) != tuple(shape):
        raise InputError(expected(name, wanted, f"shape {tuple(getattr(spread, 'shape', ()))}"))
    if spread.dtype != mean.dtype:
        raise InputError(expected(name, f"{mean.dtype}, the dtype of raw_mean", f"{spread.dtype}"))
    if spread.device != mean.device:
        raise InputError(expected(name, f"device {mean.device}, that of raw_mean", f"{spread.device}"))
    check_all_finite(name, spread)


def check_typical_norm(value: object) -> None:
    """Refuse anything but ``None`` or a positive, finite number.

    Raises:
        InputTypeError: ``value`` is not a number.
        InputError: ``value`` is not positive, or not finite.
    """
    wanted = "None, or a positive number"
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputTypeError(expected("typical_norm", wanted, f"a {type(value).__name__}"))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        raise InputError(expected("typical_norm", wanted, number))


def check_semidefinite(name: str, matrices: Tensor) -> None:
    """Refuse matrices that are not symmetric positive semidefinite, beyond the rounding errors of sums of their size.

    Args:
        name: Name of the argument.
        matrices: Finite matrices, shape (D, D) or (B, D, D).

    Raises:
        InputError: A matrix is not symmetric, or has a negative eigenvalue.
    """
    matrices = matrices.detach()
    if matrices.dtype in (torch.float16, torch.bfloat16):
        eps, matrices = torch.finfo(matrices.dtype).eps, matrices.float()
    else:
        eps = torch.finfo(matrices.dtype).eps
    if not matrices.numel():
        return
    dim = matrices.shape[-1]
    rounding = eps**0.5 + 16 * dim * eps
    size = matrices.abs().amax((-2, -1), keepdim=True)
    # Scaled first: products of very large or very small entries would overflow or underflow.
    scaled = matrices / torch.where(size > 0, size, torch.ones_like(size))
    apart = (scaled - scaled.mT).abs().amax((-2, -1))
    if bool((apart > rounding).any()):
        worst = float((apart * size.flatten().view_as(apart)).max())
        hint = "Pass (V + V.mT) / 2, which is symmetric."
        raise InputError(
            expected(name, "a symmetric matrix", f"entries that differ from the transposed ones by {worst:.3g}", hint)
        )
    eye = torch.eye(dim, dtype=scaled.dtype, device=scaled.device)
    failed = torch.linalg.cholesky_ex((scaled + scaled.mT) / 2 + 2 * rounding * eye).info != 0
    if bool(failed.any()):
        where = f" at rows {failed.nonzero().flatten()[:5].tolist()}" if failed.ndim else ""
        raise InputError(expected(name, "a positive semidefinite matrix", f"one with a negative eigenvalue{where}"))


def check_draw(n_samples: object, generator: object, device: torch.device) -> None:
    """Check the arguments of a method that draws samples.

    Raises:
        InputTypeError: ``generator`` is not a ``torch.Generator``.
        InputError: ``n_samples`` is not a positive whole number, or ``generator`` lives on another type of device.
    """
    validate.count("n_samples", n_samples)
    validate.generator(generator, device)


def check_destination(device: object, dtype: object) -> None:
    """Check where a distribution is to go.

    Args:
        device: ``None`` for where it is.
        dtype: ``None`` for the one that it has.

    Raises:
        InputTypeError: The dtype is no floating-point dtype of 16, 32 or 64 bits; or the device is none.
        InputError: There is no device of that name.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in _DTYPES):
        raise InputTypeError(expected("dtype", f"a floating-point dtype, one of {_NAMES}", f"{dtype!r}"))
    if device is None or isinstance(device, torch.device):
        return
    wanted = "a device such as 'cpu' or 'cuda:0', or a dtype"
    if isinstance(device, bool) or not isinstance(device, (str, int)):
        raise InputTypeError(expected("device", wanted, f"a {type(device).__name__}"))
    try:
        torch.device(device)
    except (RuntimeError, OverflowError, ValueError):
        named = getattr(torch, device, None) if isinstance(device, str) else None
        hint = f"Pass {named}." if isinstance(named, torch.dtype) else ""
        raise InputError(expected("device", wanted, repr(device), hint)) from None


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NAMES = ", ".join(str(dtype) for dtype in _DTYPES)
