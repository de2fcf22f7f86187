"""Checks of single values of a saved posterior: types, shapes and ranges; and the error that they all raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Never

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.network.call import ModelCall
from contrastive_curvature.network.encoder import weight_norms
from contrastive_curvature.network.inputs import Inputs, input_length

__all__ = [
    "check_inputs",
    "check_number_of",
    "check_symmetric",
    "check_takes",
    "check_tensor",
    "check_type",
    "has_norms",
    "is_semidefinite",
    "kind_of",
    "owned",
    "refuse",
    "rounding_of",
]

_MOST = 2**63 - 1
"""Largest number of points: torch's largest integer."""


def refuse(key: str, wanted: str, got: object, instead: str = "") -> Never:
    """Raise the error of a malformed state.

    Raises:
        InputError: Always; it names the key.
    """
    raise InputError(expected(f"state_dict[{key!r}]", wanted, got, instead)) from None


def check_type(state: Mapping[str, Any], key: str, kind: type, wanted: str) -> None:
    """Refuse a value of another type; ``True`` does not count as a number.

    Raises:
        InputError: The type is another.
    """
    if type(state[key]) is not kind:
        refuse(key, wanted, kind_of(state[key]))


def check_number_of(state: Mapping[str, Any], key: str) -> None:
    """Refuse a value that is not a positive whole number.

    Raises:
        InputError: Not a positive whole number.
    """
    if type(state[key]) is not int or not 0 < state[key] <= _MOST:
        refuse(key, "a positive whole number", kind_of(state[key]))


def check_tensor(
    key: str, value: object, like: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype | None = None
) -> Tensor:
    """Return a finite tensor.

    Args:
        key: Where it stands.
        value: What stands there.
        like: A parameter of the encoder, for dtype and device.
        shape: Its shape, ``None`` for a length that may be any.
        dtype: Where it is not the encoder's.

    Raises:
        InputError: Another type, shape, dtype or device, or not finite.
    """
    shown = "(" + ", ".join("*" if n is None else str(n) for n in shape) + ("," if len(shape) == 1 else "") + ")"
    wanted = f"a tensor of shape {shown}"
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        refuse(key, wanted, kind_of(value))
    got = tuple(value.shape)
    if len(got) != len(shape) or any(n is not None and n != m for n, m in zip(shape, got, strict=True)):
        refuse(key, wanted, f"shape {got}", "The encoder must be the one that the posterior was saved from.")
    if value.dtype != (dtype or like.dtype):
        hint = "Bring the encoder to the precision of the posterior."
        refuse(key, f"{dtype or like.dtype}", f"{value.dtype}", hint)
    if value.device != like.device:
        hint = f"Read the file with torch.load(..., map_location={str(like.device)!r})."
        refuse(key, f"a tensor on device {like.device}", f"one on {value.device}", hint)
    if not bool(value.detach().isfinite().all()):
        refuse(key, "finite numbers", "NaN or infinity")
    return value.detach()


def check_symmetric(key: str, matrix: Tensor, *, semidefinite: bool) -> None:
    """Refuse a matrix that is not symmetric, or has a negative eigenvalue, beyond rounding.

    Args:
        key: Where it stands.
        matrix: Shape (P, P), finite.
        semidefinite: Whether eigenvalues are looked at.

    Raises:
        InputError: The matrix is not symmetric, or has a negative eigenvalue.
    """
    size = float(matrix.abs().max()) if matrix.numel() else 0.0
    if size == 0:
        return
    # Divided first: products of very large or very small entries would leave the numbers.
    scaled = matrix / size
    apart = float((scaled - scaled.T).abs().max())
    if apart > rounding_of(matrix):
        refuse(key, "a symmetric matrix", f"entries that differ from their mirrored ones by {apart * size:.3g}")
    if semidefinite and not is_semidefinite(scaled, 1.0):
        refuse(key, "a positive semidefinite matrix", "one with a negative eigenvalue")


def rounding_of(matrix: Tensor) -> float:
    """Largest rounding error of a matrix (P, P), relative to its largest entry."""
    eps = torch.finfo(matrix.dtype).eps
    # Sums over a data set may cancel, so that their rounding is not that of the result.
    return 16 * len(matrix) * eps + eps**0.5


def is_semidefinite(matrix: Tensor, size: float) -> bool:
    """Whether a matrix (P, P) has no negative eigenvalue beyond the rounding of entries of a size."""
    eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    lifted = (matrix + matrix.T) / 2 + 2 * rounding_of(matrix) * size * eye
    return not int(torch.linalg.cholesky_ex(lifted).info)


def check_takes(key: str, x: Inputs, dim: int, model: Callable[[Any], Any], moved: Callable[[Any], Any]) -> None:
    """Refuse inputs that the encoder has no embeddings for.

    Args:
        key: Where they stand.
        x: The inputs.
        dim: Number D of outputs.
        model: The encoder, in evaluation mode.
        moved: Brings inputs to its device.

    Raises:
        InputError: It raises, or its outputs are not finite, or not of shape (N, D).
    """
    try:
        with torch.no_grad():
            z: Any = ModelCall()(model, moved(x)) if isinstance(model, nn.Module) else model(moved(x))
            fine = isinstance(z, Tensor) and tuple(z.shape) == (input_length(x), dim) and bool(z.isfinite().all())
            reason = "" if fine else "outputs that are not finite, or of another shape"
    except Exception as error:  # what an encoder raises at inputs of another kind has no common base
        reason = (str(error) or type(error).__name__).splitlines()[0]
    if reason:
        refuse(key, "inputs that the encoder takes", f"{kind_of(x)} ({reason})")


def has_norms(model: nn.Module, saved: Tensor | None) -> bool:
    """Whether a model is the one that a posterior was saved from, as far as norms of its weights tell.

    Args:
        model: The encoder.
        saved: The norms in the state, or ``None``.
    """
    now = weight_norms(model)
    # The tolerance is for other precisions.
    return saved is not None and saved.shape == now.shape and torch.allclose(now, saved.to(now), rtol=1e-3, atol=1e-12)


def check_inputs(key: str, value: object) -> Inputs:
    """Return a batch that a state keeps.

    Raises:
        InputError: Neither a tensor nor a mapping with one, or empty.
    """
    parts = [value] if isinstance(value, Tensor) else []
    if isinstance(value, Mapping):
        parts = [part for part in value.values() if isinstance(part, Tensor)]
    if not parts or not all(part.ndim and len(part) for part in parts[:1]):
        refuse(key, "a batch of inputs: a tensor, or a mapping of tensors", kind_of(value))
    return value  # type: ignore[return-value]


def owned(value: Any) -> Any:
    """Copy the views in a value, so that no file of it holds the rest of the memory that they look into."""
    if isinstance(value, Tensor):
        return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
    if isinstance(value, Mapping):
        return {key: owned(part) for key, part in value.items()}
    return type(value)(map(owned, value)) if type(value) in (list, tuple) else value


def kind_of(value: object) -> str:
    """A short description of a value, for a message."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, shape {tuple(value.shape)}, on {value.device}"
    if isinstance(value, (str, int, float)) or value is None:
        shown = repr(value)
        return shown if len(shown) < 60 else f"{shown[:57]}..."
    return f"a {type(value).__name__}"
