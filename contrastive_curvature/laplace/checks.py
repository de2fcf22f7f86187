"""Checks of the arguments of a contrastive Laplace object, before anything is computed or changed."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Real

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.embedding.distribution import InvalidRowsError
from contrastive_curvature.errors import InputError, InputTypeError, expected
from contrastive_curvature.network.inputs import Inputs

__all__ = [
    "check_finite_outputs",
    "check_indices",
    "check_jacobians",
    "check_number",
    "check_output_shape",
    "check_prior_mean",
    "check_prior_precision",
    "check_temperature",
    "check_text",
    "check_value",
    "plain_number",
]


def check_number(argument: str, value: object, *, positive: bool = False, most: float = math.inf) -> float:
    """Return a finite number.

    Args:
        argument: Its name.
        value: What the user passed.
        positive: Whether it has to be above zero.
        most: How large its absolute value may be.

    Raises:
        InputTypeError: Not a number.
        InputError: NaN, infinite, not positive or too large.
    """
    wanted = "a positive number" if positive else "a finite number"
    wanted += f" of at most {most:g}" if most < math.inf else ""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputTypeError(expected(argument, wanted, _shown(value)))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > most or (positive and number <= 0):
        raise InputError(expected(argument, wanted, value))
    return number


def check_text(argument: str, value: object, *, optional: bool = False) -> None:
    """Refuse an argument that is not a name.

    Raises:
        InputTypeError: Not a string.
    """
    if not isinstance(value, str) and not (optional and value is None):
        raise InputTypeError(expected(argument, "a name" + (" or None" if optional else ""), _shown(value)))


def check_temperature(value: object, dtype: torch.dtype) -> float:
    """Return a temperature that the curvature can be divided by.

    Args:
        value: A number, or a tensor of one.
        dtype: Of the encoder.

    Raises:
        InputTypeError: Not a number.
        InputError: Not positive and finite, or so extreme that its inverse is not.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool:
        value = value.item()
    number = check_number("temperature", value, positive=True)
    inverse = torch.ones((), dtype=dtype) / number
    if not bool(inverse.isfinite()) or not bool(inverse > 0):
        raise InputError(expected("temperature", f"a number whose inverse is positive and finite in {dtype}", number))
    return number


def check_prior_precision(
    value: object, dtype: torch.dtype, sizes: Collection[int] | None = None, argument: str = "prior_precision"
) -> None:
    """Refuse an argument that is not a precision.

    Args:
        value: A number, or a tensor of at most one dimension.
        dtype: Of the encoder: what underflows to zero there is refused.
        sizes: Numbers of entries that there is room for; ``None`` where that is not known yet.
        argument: Its name.

    Raises:
        InputTypeError: Neither a number nor a tensor of numbers.
        InputError: Not positive and finite, or of another size.
    """
    given = _vector(argument, "a positive number or a tensor of them", value, dtype, sizes)
    if not bool(((given > 0) & given.isfinite()).all()):
        shown = str(value) if given.numel() == 1 else f"a smallest value of {float(given.min())}"
        raise InputError(expected(argument, f"positive numbers, finite in {dtype}", shown))


def check_prior_mean(value: object, dtype: torch.dtype, sizes: Collection[int] | None = None) -> None:
    """Refuse an argument that is not a mean; see :func:`check_prior_precision`.

    Raises:
        InputTypeError: Neither a number nor a tensor of numbers.
        InputError: Not finite, or of another size.
    """
    given = _vector("prior_mean", "a finite number or a tensor of them", value, dtype, sizes)
    if not bool(given.isfinite().all()):
        shown = str(value) if given.numel() == 1 else "NaN or infinity"
        raise InputError(expected("prior_mean", f"finite numbers in {dtype}", shown))


def plain_number(value: float | Tensor) -> float | Tensor:
    """A number as a Python float: laplace-torch accepts only some of NumPy's numbers."""
    return value if isinstance(value, Tensor) else float(value)


def _vector(argument: str, wanted: str, value: object, dtype: torch.dtype, sizes: Collection[int] | None) -> Tensor:
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, Real):
            hint = "Wrap it with torch.tensor(...)." if isinstance(value, (list, tuple)) else ""
            raise InputTypeError(expected(argument, wanted, _shown(value), hint))
        try:
            return torch.tensor(float(value), dtype=dtype)
        except OverflowError:
            return torch.tensor(math.inf, dtype=dtype)
    validate.dense(argument, value)
    given = value.detach()
    if given.is_complex() or given.dtype == torch.bool:
        raise InputTypeError(expected(argument, wanted, f"a tensor of {given.dtype}"))
    if given.ndim > 1 or not given.numel():
        raise InputError(expected(argument, "a number or shape (K,), not empty", f"shape {tuple(given.shape)}"))
    if sizes is not None and given.numel() not in {1, *sizes}:
        room = " or ".join(str(size) for size in sorted({1, *sizes}))
        raise InputError(expected(argument, f"{room} entries", f"{given.numel()}"))
    return given.to(dtype)


def check_indices(value: object, n_params: int) -> Tensor:
    """Return the indices of a subnetwork, on the CPU, where laplace-torch takes them.

    Args:
        value: What the user passed.
        n_params: Number P of the encoder's trainable parameters.

    Returns:
        Shape (K,), int64.

    Raises:
        InputTypeError: No tensor of whole numbers.
        InputError: Missing, empty, not one-dimensional, out of range or with duplicates.
    """
    hint = "They are positions in the flattened trainable parameters, as torch.tensor([0, 5, 7])."
    wanted = "a tensor of whole numbers, shape (K,)"
    if value is None:
        raise InputError(expected("subnetwork_indices", wanted, None, hint))
    if not isinstance(value, Tensor):
        raise InputTypeError(expected("subnetwork_indices", wanted, f"a {type(value).__name__}", hint))
    if value.dtype != torch.int64:
        raise InputTypeError(expected("subnetwork_indices", "dtype torch.int64", f"{value.dtype}", hint))
    validate.dense("subnetwork_indices", value)
    if value.ndim != 1 or not value.numel():
        raise InputError(expected("subnetwork_indices", "shape (K,), K >= 1", f"shape {tuple(value.shape)}", hint))
    low, high = int(value.min()), int(value.max())
    if low < 0 or high >= n_params:
        raise InputError(expected("subnetwork_indices", f"indices in [0, {n_params})", f"{low} to {high}"))
    if value.unique().numel() < value.numel():
        raise InputError(expected("subnetwork_indices", "different indices", "some of them twice"))
    return value.cpu()


def check_value(value: object, like: Tensor, size: int) -> None:
    """Refuse an argument that is not a vector of the posterior's weights.

    Args:
        value: What the user passed.
        like: The posterior's mean, for dtype and device.
        size: Number P of weights.

    Raises:
        InputTypeError: No tensor of the encoder's dtype.
        InputError: Not of shape (P,), on another device, or not finite.
    """
    if not isinstance(value, Tensor) or value.dtype != like.dtype:
        shown = f"{value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise InputTypeError(expected("value", f"a tensor of {like.dtype}", shown))
    if tuple(value.shape) != (size,):
        raise InputError(expected("value", f"weights of shape ({size},)", f"shape {tuple(value.shape)}"))
    if value.device != like.device:
        raise InputError(expected("value", f"weights on device {like.device}", f"on {value.device}"))
    if not bool(value.isfinite().all()):
        raise InputError(expected("value", "finite weights", "NaN or infinity"))


def check_jacobians(value: object, like: Tensor, size: int) -> None:
    """Refuse an argument that does not hold Jacobians with respect to the posterior's weights.

    Raises:
        InputTypeError: No tensor of the encoder's dtype.
        InputError: Not of shape (B, D, P), or on another device.
    """
    if not isinstance(value, Tensor) or value.dtype != like.dtype:
        shown = f"{value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise InputTypeError(expected("Js", f"Jacobians as a tensor of {like.dtype}", shown))
    if value.ndim != 3 or value.shape[2] != size:
        raise InputError(expected("Js", f"Jacobians of shape (B, D, {size})", f"shape {tuple(value.shape)}"))
    if value.device != like.device:
        raise InputError(expected("Js", f"Jacobians on device {like.device}", f"on {value.device}"))


def check_finite_outputs(x: Inputs, z: Tensor) -> None:
    """Refuse inputs whose outputs are not finite.

    Args:
        x: The inputs.
        z: Their raw outputs, shape (..., B, D).

    Raises:
        InputError: Some are NaN or infinite; the message says in which rows, and whether the inputs are to blame.
    """
    good = z.detach().isfinite()
    if bool(good.all()):
        return
    bad = (~good.all(dim=-1)).reshape(-1, z.shape[-2]).any(0)
    rows = bad.nonzero().flatten()[:5].tolist()
    tensors = [x] if isinstance(x, Tensor) else [value for value in x.values() if isinstance(value, Tensor)]
    finite = all(bool(t.isfinite().all()) for t in tensors)
    hint = "The inputs themselves are finite." if finite else "The inputs hold NaN or infinity themselves."
    hint += " Leave them out, or call la(x, on_invalid='nan'), which gives NaN for these rows alone."
    received = f"NaN or infinity in rows {rows}"
    raise InvalidRowsError(expected("x", "inputs with finite outputs", received, hint), bad)


def check_output_shape(x: Inputs, z: Tensor, dim: int) -> None:
    """Refuse inputs that the encoder takes, but not as a batch of points: linear layers take any number of axes.

    Args:
        x: The inputs.
        z: Their raw outputs.
        dim: Number D of outputs in the fit.

    Raises:
        InputError: The outputs are not of shape (B, D).
    """
    if z.ndim == 2 and z.shape[1] == dim:
        return
    tensors = {"": x} if isinstance(x, Tensor) else x
    shapes = [f"{key} {tuple(t.shape)}".strip() for key, t in tensors.items() if isinstance(t, Tensor)]
    wanted = f"inputs like those of the fit, with outputs of shape (B, {dim})"
    received = f"shape {', '.join(shapes)}, with outputs of shape {tuple(z.shape)}"
    raise InputError(
        expected("x", wanted, received, "One axis, the first, is that of the batch: x[None] of one point.")
    )


def _shown(value: object) -> str:
    if isinstance(value, (str, bool, int, float, complex)) or value is None:
        return repr(value)
    return f"a {type(value).__name__}"
