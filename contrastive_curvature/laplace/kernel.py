"""Kernels ``J_i J_j^T`` between points in float64, from Jacobians in chunks of bounded size.

Float64, because the posterior is a small difference of such numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.ggn.dominance import FEWEST_POINTS, MOST, warn_of_point
from contrastive_curvature.ggn.finite import check_finite
from contrastive_curvature.ggn.subset import HessianSubset
from contrastive_curvature.network.inputs import input_length
from contrastive_curvature.network.pullback import JACOBIAN_ELEMENTS

__all__ = ["jacobian_chunks", "kernel_between", "kernels_of_points", "refuse_infinite_jacobian", "warn_of_one_point"]


def jacobian_chunks(la: Any, context: Any) -> Iterator[tuple[slice, Tensor]]:
    """Jacobians (C, D, P) of points, with the slices of the points.

    Args:
        la: A posterior over all parameters.
        context: Of N points.
    """
    pullback, dim, n = la.backend.pullback(context), la._encoder_dim(), input_length(context)
    axes = torch.eye(dim, dtype=la._dtype, device=la._device)
    step = max(1, JACOBIAN_ELEMENTS // (dim * pullback.width))
    # No points are one empty chunk.
    for start in range(0, max(1, n), step):
        rows = slice(start, min(start + step, n))
        part = pullback.slice_context(context, rows)
        yield rows, pullback.vjp(part, axes.expand(rows.stop - start, -1, -1))


def kernel_between(la: Any, left: Any, right: Any) -> Tensor:
    """The kernel between two sets of points, shape (A, D, B, D)."""
    return torch.cat([_times(la, some.double(), right) for _, some in jacobian_chunks(la, left)])


def kernels_of_points(la: Any, points: Any, held: Any, diagonal: bool) -> tuple[Tensor, Tensor]:
    """The kernel of every point with itself, and with the points that a posterior holds.

    Args:
        la: A posterior over all parameters.
        points: Context of B points.
        held: Context of M points.
        diagonal: Whether the diagonal of a point's own kernel is enough.

    Returns:
        Shape (B, D) or (B, D, D), and (B, D, M, D).
    """
    own, cross = [], []
    for _, some in jacobian_chunks(la, points):
        mine = some.double()
        own.append(mine.square().sum(2) if diagonal else mine @ mine.mT)
        cross.append(_times(la, mine, held))
    return torch.cat(own), torch.cat(cross)


def _times(la: Any, mine: Tensor, right: Any) -> Tensor:
    """Products of Jacobians (A, D, P) with those of B points, shape (A, D, B, D)."""
    others = (other.double() for _, other in jacobian_chunks(la, right))
    return torch.cat([torch.einsum("adp,bep->adbe", mine, other) for other in others], dim=2)


def refuse_infinite_jacobian(la: Any, context: Any) -> None:
    """Name the layer whose Jacobian is not finite at the points that stand for the data.

    Raises:
        InputError: There is one.
    """
    pullback = la.backend.pullback(context)
    for rows, jacobian in jacobian_chunks(la, context):
        where = f"the points {rows.start} to {rows.stop - 1} of those that stand for the data"
        check_finite(jacobian.abs().sum((0, 1)), pullback, where)


def warn_of_one_point(subset: HessianSubset, kernel: Tensor) -> None:
    """Warn where one of the chosen points carries most of ``tr(S^T K S)``; the kernel has shape (M, D, M, D)."""
    points = torch.arange(kernel.shape[0], device=kernel.device)
    own = kernel[points, :, points, :]
    parts = torch.einsum("mdr,mde,mer->m", subset.factor, own, subset.factor)
    fraction = float(parts.max() / parts.sum()) if bool(parts.sum() > 0) else 0.0
    if len(parts) >= FEWEST_POINTS and fraction > MOST:
        where = f"point {int(parts.argmax())} of the chosen ones"
        warn_of_point(fraction, where, "of the points that stand for the data")
