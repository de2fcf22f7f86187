"""The parameter curvature of one set of points that is there at once, and the clamp that comes last."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.ggn.spectrum import eigenpairs
from contrastive_curvature.hessian.blocks import NodeBlocks
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.losses.weights import PairWeights
from contrastive_curvature.network import pullback as pullback_file
from contrastive_curvature.network.pullback import Points, Pullback
from contrastive_curvature.options import CurvatureOptions, PDFix, Structure

__all__ = ["clamp_curvature", "make_blocks", "points_curvature", "tiled_cross_term"]


def make_blocks(u: Tensor, n: Tensor, d: Tensor, s: Tensor, options: CurvatureOptions) -> NodeBlocks:
    """Diagonal blocks with the fix applied, from degrees and pulls."""
    blocks = NodeBlocks.from_sums(u, n, d, s, options.distance)
    return blocks.project_psd() if options.pd_fix is PDFix.PSD else blocks


def points_curvature(
    pullback: Pullback, points: Points, weights: PairWeights, options: CurvatureOptions, structure: Structure
) -> Tensor:
    """``J^T H J`` over all pairs of the given points, unclamped.

    Args:
        pullback: The network.
        points: N points.
        weights: Their pair weights.
        options: Distance and fix.
        structure: ``diag`` or ``full``.

    Returns:
        Shape (P,) or (P, P).
    """
    coupled = options.pd_fix.coupled
    if coupled and structure is Structure.FULL and points.u.numel() * pullback.width <= pullback_file.JACOBIAN_ELEMENTS:
        return _dense_term(pullback, points, weights, options)
    blocks = make_blocks(points.u, points.n, *weights.node_sums(), options)
    out = pullback.block_term(points, blocks, structure)
    if coupled:
        out -= tiled_cross_term(pullback, points, weights, structure)
    return out


def _dense_term(pullback: Pullback, points: Points, weights: PairWeights, options: CurvatureOptions) -> Tensor:
    """``J^T (H J)`` with all Jacobians at once: one product of large matrices instead of two."""
    n, dim = points.u.shape
    axes = torch.eye(dim, dtype=points.u.dtype, device=points.u.device).expand(n, dim, dim)
    jacobian = pullback.vjp(points.context, axes)
    curved = OutputHessian(points.u * points.n.unsqueeze(1), weights, options).matvec(jacobian)
    return jacobian.flatten(0, 1).T @ curved.flatten(0, 1)


def tiled_cross_term(pullback: Pullback, points: Points, weights: PairWeights, structure: Structure) -> Tensor:
    """``sum_{i != j} y_ij A_i^T A_j`` in tiles of bounded size."""
    n = len(points)
    step = pullback.tile_size(structure)
    if n <= step:
        return pullback.cross_term(points, points, weights.dense(), structure)
    total: Tensor | int = 0
    tiles = [slice(k, min(k + step, n)) for k in range(0, n, step)]
    for rows in tiles:
        y = weights.rows(rows.start, rows.stop)
        left = pullback.part(points, rows)
        for columns in tiles:
            right = left if columns == rows else pullback.part(points, columns)
            total = total + pullback.cross_term(left, right, y[:, columns], structure)
    return torch.as_tensor(total)


def clamp_curvature(curvature: Tensor) -> Tensor:
    """Make an accumulated curvature positive semidefinite, once, at the end.

    Args:
        curvature: A diagonal (P,) or a symmetric matrix (P, P).

    Returns:
        The diagonal with negative entries set to zero (paper, Eq. 108 and Proposition F.1), or the matrix with negative
        eigenvalues set to zero: an element-wise ReLU would not make a matrix positive semidefinite.

    Raises:
        InputError: A matrix is not finite, or its eigenvalues cannot be computed.
    """
    if curvature.ndim == 1:
        return curvature.clamp(min=0)
    symmetric = (curvature + curvature.T) / 2
    values, vectors = eigenpairs(symmetric)
    if not values.numel() or values[0] >= 0:
        return symmetric
    return (vectors * values.clamp(min=0)) @ vectors.T
