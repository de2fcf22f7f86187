"""Whether the host differentiates the user's network: outputs and a product, against autograd through the encoder.

BackPACK sees layers only, not what a hook changes; every Jacobian would silently be that of another function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hosts.backpack.layers import ADVICE
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.threads import private_copy

__all__ = ["POINTS", "attempt", "autograd_product", "check_outputs", "check_product", "random_cotangents"]

_T = TypeVar("_T")

POINTS = 8
"""Points of a batch that autograd runs over."""


def attempt(what: str, compute: Callable[[], _T]) -> _T:
    """Run a computation, and turn what the host raises into a refusal.

    Args:
        what: Named in the message.
        compute: The computation.

    Returns:
        Its result.

    Raises:
        UnsupportedError: It fails; out of memory stays what it is.
    """
    try:
        return compute()
    except (UnsupportedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        msg = f"backend BackPACK: {what} fails ({reason}). {ADVICE}"
        raise UnsupportedError(msg) from error


def random_cotangents(z: Tensor) -> Tensor:
    """Cotangents in the shape of the outputs, always the same, without a draw from the user's generator."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(z.shape, generator=generator, dtype=z.dtype).to(z.device)


def autograd_product(encoder: Encoder, params: list[nn.Parameter], x: Tensor, v: Tensor) -> Tensor:
    """``sum_i J_i^T v_i`` by autograd through the encoder, shape (P,); zero for parameters without a path."""
    # A copy, for the hooks of BackPACK: neither shall this forward overwrite what an extended model keeps, nor this
    # backward delete it.
    own = private_copy(encoder, backward_hooks=False)
    with torch.inference_mode(False), torch.enable_grad():
        z = own(x.detach().clone())
        found: tuple[Tensor | None, ...] = (None,) * len(params)
        if z.requires_grad and params:
            found = torch.autograd.grad(z, params, v.clone(), allow_unused=True)
    parts = [torch.zeros_like(p) if g is None else g for g, p in zip(found, params, strict=True)]
    return torch.cat([v.new_zeros(0), *(part.detach().flatten() for part in parts)])


def check_outputs(found: Tensor, wanted: Tensor) -> None:
    """Refuse outputs of the copy that are not the encoder's.

    Raises:
        UnsupportedError: They differ beyond rounding.
    """
    # The same operations in the same order: tighter than for products, of which BackPACK computes some in other ways.
    if found.shape != wanted.shape or not _close(found, wanted, 0.1):
        msg = (
            "backend BackPACK: a copy of the encoder gives other outputs than itself (something that works in place, "
            f"or that a copy does not share?). {ADVICE}"
        )
        raise UnsupportedError(msg)


def check_product(found: Tensor, wanted: Tensor) -> None:
    """Refuse a product with the Jacobian that is not autograd's.

    Raises:
        UnsupportedError: They differ beyond rounding.
    """
    if not _close(found, wanted, 1.0):
        msg = (
            "backend BackPACK: the host's rules give other gradients than autograd through the encoder (a hook that "
            f"changes an output?). {ADVICE}"
        )
        raise UnsupportedError(msg)


def _close(found: Tensor, wanted: Tensor, factor: float) -> bool:
    """Whether two tensors agree up to a part of the largest entry; not, where there is a NaN."""
    if not wanted.numel():
        return True
    # On a GPU, convolutions and products may be rounded to the ten bits of TF32.
    tolerance = 1e-8 if wanted.dtype == torch.float64 else factor * (1e-2 if wanted.is_cuda else 1e-3)
    return float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())
