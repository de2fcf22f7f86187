"""The unit sphere: normalisation and the tangent projector of raw outputs (N, D)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = ["L2Norm", "check_outputs", "normalize", "project_tangent"]


class L2Norm(nn.Module):
    """Divide every row by its Euclidean norm: the last module of an encoder that embeds on the unit sphere.

    No epsilon is added, so that value and derivative belong to the same function ``z / |z|``; a row of zeros, where
    that function is undefined, stays zero.
    """

    def forward(self, z: Tensor) -> Tensor:
        """Normalise ``z`` of shape (..., D)."""
        norm = z.norm(dim=-1, keepdim=True)
        return z / torch.where(norm > 0, norm, torch.ones_like(norm))


def check_outputs(z: Tensor, argument: str = "z") -> Tensor:
    """Check raw outputs, and lift half precision to float32.

    Args:
        z: Raw outputs, shape (N, D).
        argument: Name for the error message.

    Returns:
        ``z`` itself, or its float32 copy when it came in half precision.

    Raises:
        InputTypeError: Not a real floating-point tensor.
        InputError: Not of shape (N, D), NaN or infinite, or a row of zeros, whose direction is undefined.
    """
    if not isinstance(z, Tensor):
        raise InputTypeError(expected(argument, "a torch.Tensor of shape (N, D)", f"a {type(z).__name__}"))
    if not z.is_floating_point():
        raise InputTypeError(expected(argument, "a floating-point tensor", f"dtype {z.dtype}", "Call .float() on it."))
    if z.ndim != 2 or z.shape[1] == 0:
        raise InputError(
            expected(argument, "shape (N, D) with D >= 1", f"shape {tuple(z.shape)}", "One row is one embedding.")
        )
    if z.dtype in (torch.float16, torch.bfloat16):
        z = z.float()
    with torch.no_grad():
        finite = z.isfinite().all(dim=1)
        if not bool(finite.all()):
            rows = (~finite).nonzero().flatten()[:5].tolist()
            raise InputError(expected(argument, "finite embeddings", f"NaN or infinity in rows {rows}"))
        zero = z.norm(dim=1) == 0
        if bool(zero.any()):
            rows = zero.nonzero().flatten()[:5].tolist()
            hint = "A zero output has no direction on the sphere; look for a dead unit or an all-zero input."
            raise InputError(expected(argument, "embeddings of non-zero norm", f"zero norm in rows {rows}", hint))
    return z


def normalize(z: Tensor) -> tuple[Tensor, Tensor]:
    """Split checked outputs into direction and length.

    Args:
        z: Raw outputs without zero rows, shape (N, D).

    Returns:
        ``u`` of shape (N, D) on the unit sphere, and ``n = |z|`` of shape (N,).
    """
    n = z.norm(dim=1)
    return z / n.unsqueeze(1), n


def project_tangent(u: Tensor, v: Tensor) -> Tensor:
    """Apply ``P_i = I - u_i u_i^T`` to every row of ``v``.

    Args:
        u: Unit vectors, shape (N, D).
        v: Vectors to project, shape (N, D) or (N, D, K).

    Returns:
        The projections, of the shape of ``v``.
    """
    if v.ndim == 2:
        return v - u * (u * v).sum(1, keepdim=True)
    return v - u.unsqueeze(-1) * (u.unsqueeze(1) @ v)
