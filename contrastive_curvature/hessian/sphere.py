"""The unit sphere: normalisation and the tangent projector of raw outputs (N, D)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from contrastive_curvature import validate, waiting
from contrastive_curvature.errors import InputError, InputTypeError


class L2Norm(nn.Module):
    """Divide every row by its Euclidean norm: the last module of an encoder that embeds on the unit sphere.

    No epsilon is added, so value and derivative belong to the same function ``z / |z|``. This function is undefined for
    a row of zeros, which stays zero.
    """

    def forward(self, z: Tensor) -> Tensor:
        """Normalise ``z`` of shape (..., D)."""
        scaled = z / _power_of_two(z)
        norm = scaled.norm(dim=-1, keepdim=True)
        return scaled / torch.where(norm > 0, norm, torch.ones_like(norm))


def check_outputs(z: Tensor, argument: str = "z") -> Tensor:
    """Check that raw outputs (N, D) are finite and nonzero in every row; half precision becomes float32."""
    if not isinstance(z, Tensor):
        raise InputTypeError(argument, "a torch.Tensor of shape (N, D)", f"a {type(z).__name__}")
    validate.dense(argument, z)
    validate.device(argument, z)
    if not z.is_floating_point():
        raise InputTypeError(argument, "a floating-point tensor", f"dtype {z.dtype}", "Call .float() on it.")
    if z.ndim != 2 or z.shape[1] == 0:
        raise InputError(argument, "shape (N, D) with D >= 1", f"shape {tuple(z.shape)}", "One row is one embedding.")
    if z.dtype in (torch.float16, torch.bfloat16):
        z = z.float()
    with torch.no_grad():
        # The largest entry of a row is NaN if any entry is.
        size = z.abs().amax(dim=1)
        waiting.require(((size > 0) & (size < torch.inf)).all(), partial(_without_direction, argument, size))
    return z


def _without_direction(argument: str, size: Tensor) -> InputError:
    """Return the error for outputs whose largest entries (N,) are not all positive and finite."""
    size = waiting.unwrapped(size)
    finite = size.isfinite()
    if not bool(finite.all()):
        rows = (~finite).nonzero()[:5, -1].tolist()
        return InputError(argument, "finite embeddings", f"NaN or infinity in rows {rows}")
    zero = (size == 0).nonzero()[:5, -1].tolist()
    hint = "A zero output has no direction on the sphere; look for a dead unit or an all-zero input."
    return InputError(argument, "embeddings of non-zero norm", f"zero norm in rows {zero}", hint)


def normalize(z: Tensor) -> tuple[Tensor, Tensor]:
    """Split checked outputs (..., D) without zero rows into directions (..., D) and lengths (...).

    The directions are finite for every finite ``z``; a length that the dtype cannot hold is infinite.
    """
    scale = _power_of_two(z)
    scaled = z / scale
    length = scaled.norm(dim=-1, keepdim=True)
    return scaled / length, (length * scale).squeeze(-1)


def norms(z: Tensor) -> Tensor:
    """Return ``|z|``, shape (...), for ``z`` (..., D), which may have zero rows; no square overflows."""
    scale = _power_of_two(z)
    return ((z / scale).norm(dim=-1, keepdim=True) * scale).squeeze(-1)


def _power_of_two(z: Tensor) -> Tensor:
    """Return a power of two near the largest entry of every row, shape (..., 1), without a graph.

    In float32 the squares of numbers above 1e19 overflow, and squares of numbers below 1e-23 vanish. Dividing by a
    power of two rounds nothing, so results in the usual range are the same to the last bit.
    """
    largest = z.detach().abs().amax(dim=-1, keepdim=True)
    return largest.log2().floor().exp2().clamp(min=torch.finfo(z.dtype).tiny)


def project_tangent(u: Tensor, v: Tensor) -> Tensor:
    """Apply ``P_i = I - u_i u_i^T``, with unit vectors ``u`` (N, D), to every row of ``v``, (N, D) or (N, D, K)."""
    if v.ndim == 2:
        return v - u * (u * v).sum(1, keepdim=True)
    return v - u.unsqueeze(-1) * (u.unsqueeze(1) @ v)
