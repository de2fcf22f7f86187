"""Kernels ``J_i J_j^T`` between points in float64, from Jacobians in chunks of bounded size.

Float64, because the posterior is a small difference of such numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.fit.finite import check_finite
from contrastive_curvature.fit.subset import HessianSubset
from contrastive_curvature.network.encoder import evaluation_mode
from contrastive_curvature.network.inputs import input_length
from contrastive_curvature.network.pullback import JACOBIAN_ELEMENTS
from contrastive_curvature.parts.contributions import FEWEST_POINTS, MOST, warn_of_point

__all__ = [
    "held_jacobians",
    "held_subset",
    "jacobian_chunks",
    "joint_spread",
    "kernel_between",
    "kernel_product",
    "kernels_of_points",
    "marginal_spread",
    "project_weights",
    "refuse_infinite_jacobian",
    "warn_of_one_point",
]


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


def joint_spread(la: Any, points: Any, held: Any) -> Tensor:
    """Covariance of all outputs of B points together, shape (B D, B D); see :func:`kernels_of_points`."""
    k, explained = (part.flatten(0, 1) for part in _explained(la, la._kernel(points, held)))
    own = la._kernel(points, points)
    return (own.reshape(len(k), len(k)) - explained @ k.T) / la.prior_precision.squeeze()


def marginal_spread(la: Any, points: Any, held: Any, diagonal: bool) -> Tensor:
    """Variances (B, D) or covariances (B, D, D) of the outputs of B points; see :func:`kernels_of_points`."""
    own, cross = la._kernels_of_points(points, held, diagonal)
    (k, explained), prior = _explained(la, cross), la.prior_precision.squeeze()
    # A difference of large numbers: rounding can make a small variance negative.
    if diagonal:
        return ((own - (explained * k).sum(2)) / prior).clamp(min=0)
    covariance = (own - explained @ k.mT) / prior
    variances = covariance.diagonal(dim1=1, dim2=2)
    return covariance + torch.diag_embed(variances.clamp(min=0) - variances)


def _explained(la: Any, cross: Tensor) -> tuple[Tensor, Tensor]:
    """Kernels (B, D, M, D) in the eigenbasis of the data's, and the same over its eigenvalues, both (B, D, R)."""
    k = held_subset(la).project(cross) @ la.H["vectors"]
    return k, k / (la.H["values"] + la.prior_precision.squeeze() / la._H_factor)


def held_subset(la: Any) -> HessianSubset:
    """The points that represent the data, with the root of their output Hessian."""
    return HessianSubset(la.H["inputs"], la.H["factor"], la.H["coupled"])


def held_jacobians(la: Any) -> Iterator[tuple[slice, Tensor]]:
    """Jacobians of the points that represent the data; see :func:`jacobian_chunks`."""
    return jacobian_chunks(la, la._embed(la.H["inputs"])[1])


def project_weights(la: Any, weights: Tensor) -> Tensor:
    """``A w`` with ``A = S^T J`` of the points that represent the data, shape (S, R), for weights (S, P)."""
    with evaluation_mode(la.model), torch.no_grad():
        jacobians = (jacobian.double() for _, jacobian in held_jacobians(la))
        parts = [torch.einsum("mdp,sp->smd", jacobian, weights.double()) for jacobian in jacobians]
    return held_subset(la).project(torch.cat(parts, dim=1))


def kernel_product(la: Any, vector: Tensor) -> Tensor:
    """``A A^T v`` for a vector (R,), from one vector-Jacobian product and one product: no matrix is formed."""
    lifted = held_subset(la).lift(vector)
    rows = (torch.einsum("md,mdp->p", lifted[some], part.double()) for some, part in held_jacobians(la))
    return project_weights(la, torch.stack(list(rows)).sum(0, keepdim=True))[0]


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
