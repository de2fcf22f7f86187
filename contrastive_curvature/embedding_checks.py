"""What may be a mean and a spread of embeddings, up to the rounding of the numbers they came from."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.arguments import check_count, check_dense, check_generator
from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = [
    "check_all_finite",
    "check_draw",
    "check_floats",
    "check_mean",
    "check_semidefinite",
    "check_spread",
]


def check_floats(name: str, value: object, wanted: str) -> None:
    """Refuse what is no tensor of real floating-point numbers.

    Raises:
        InputTypeError: It is not.
    """
    if not isinstance(value, Tensor):
        raise InputTypeError(expected(name, f"a torch.Tensor, {wanted}", f"a {type(value).__name__}"))
    check_dense(name, value)
    if not value.is_floating_point():
        raise InputTypeError(expected(name, "a floating-point tensor", f"{value.dtype}", "Call .float() on it."))


def check_all_finite(name: str, value: Tensor) -> None:
    """Refuse NaN and infinity.

    Raises:
        InputError: There is one.
    """
    bad = int((~value.detach().isfinite()).sum())
    if bad:
        raise InputError(expected(name, "finite numbers", f"{bad} of {value.numel()} NaN or infinite"))


def check_mean(mean: object) -> None:
    """Refuse what is no mean of raw outputs.

    Raises:
        InputTypeError: No tensor of floats.
        InputError: Not of shape (B, D) with D >= 2, not finite, or with a row of zeros.
    """
    wanted = "shape (B, D) with D >= 2"
    check_floats("mean", mean, wanted)
    if not isinstance(mean, Tensor) or mean.ndim != 2 or mean.shape[1] < 2:
        raise InputError(expected("mean", wanted, f"shape {tuple(getattr(mean, 'shape', ()))}"))
    check_all_finite("mean", mean)
    zero = (mean.detach() == 0).all(1)
    if bool(zero.any()):
        rows = zero.nonzero().flatten()[:5].tolist()
        raise InputError(expected("mean", "rows that are not zero", f"zero rows {rows}", "Zero has no direction."))


def check_spread(name: str, spread: object, mean: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a spread that does not go with the mean.

    Raises:
        InputTypeError: No tensor of floats.
        InputError: Another shape, dtype or device, or not finite.
    """
    wanted = f"shape {tuple(shape)} to go with mean {tuple(mean.shape)}"
    check_floats(name, spread, wanted)
    if not isinstance(spread, Tensor) or tuple(spread.shape) != tuple(shape):
        raise InputError(expected(name, wanted, f"shape {tuple(getattr(spread, 'shape', ()))}"))
    if spread.dtype != mean.dtype:
        raise InputError(expected(name, f"{mean.dtype}, the dtype of mean", f"{spread.dtype}"))
    if spread.device != mean.device:
        raise InputError(expected(name, f"device {mean.device}, that of mean", f"{spread.device}"))
    check_all_finite(name, spread)


def check_semidefinite(name: str, matrices: Tensor) -> None:
    """Refuse matrices that are not symmetric positive semidefinite, beyond the rounding of sums of their size.

    Args:
        name: Of the argument.
        matrices: Finite, shape (D, D) or (B, D, D).

    Raises:
        InputError: One of them is not.
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
    # Divided first: products of very large or very small entries would leave the numbers.
    scaled = matrices / torch.where(size > 0, size, torch.ones_like(size))
    apart = (scaled - scaled.mT).abs().amax((-2, -1))
    if bool((apart > rounding).any()):
        worst = float((apart * size.flatten().view_as(apart)).max())
        hint = "For a symmetric one, pass (V + V.mT) / 2."
        raise InputError(
            expected(name, "symmetric", f"entries that differ from their mirrored ones by {worst:.3g}", hint)
        )
    eye = torch.eye(dim, dtype=scaled.dtype, device=scaled.device)
    failed = torch.linalg.cholesky_ex((scaled + scaled.mT) / 2 + 2 * rounding * eye).info != 0
    if bool(failed.any()):
        where = f" at rows {failed.nonzero().flatten()[:5].tolist()}" if failed.ndim else ""
        raise InputError(expected(name, "a positive semidefinite matrix", f"one with a negative eigenvalue{where}"))


def check_draw(n_samples: object, generator: object, device: torch.device) -> None:
    """Refuse what no samples can be drawn with.

    Raises:
        InputTypeError: ``generator`` is no ``torch.Generator``.
        InputError: ``n_samples`` is no positive whole number, or ``generator`` is another device's.
    """
    check_count("n_samples", n_samples)
    check_generator(generator, device)
