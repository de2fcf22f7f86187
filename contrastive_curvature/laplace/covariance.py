"""The Gaussian over raw outputs that a posterior over weights implies, in closed form for a linear last layer."""

from __future__ import annotations

import torch
from laplace.utils.matrix import KronDecomposed
from torch import Tensor

from contrastive_curvature.embedding.spread import Axes
from contrastive_curvature.network.full_precision import full_precision

__all__ = ["dense_last_layer_covariance", "kron_last_layer_covariance"]


@full_precision
def kron_last_layer_covariance(phi: Tensor, precision: KronDecomposed) -> Axes:
    """Covariance under the precision ``G (x) A + delta I`` of the weight, and ``G_b + delta_b I`` of the bias.

    Args:
        phi: Features, shape (B, F).
        precision: laplace-torch's decomposed posterior precision of the layer.

    Returns:
        The covariances of the outputs. In the eigenbasis of ``G`` the weight's part is diagonal, with
        ``sum_f (U_A^T phi)_f^2 / (g_k a_f + delta)`` for axis k.
    """
    (q_g, q_a), (g, a) = precision.eigenvectors[0], precision.eigenvalues[0]
    delta = precision.deltas[0]
    damp = delta.sqrt()
    scale = torch.outer(g + damp, a + damp) if precision.damping else torch.outer(g, a) + delta
    # An encoder that was converted after the fit has features of another dtype.
    along = (phi.to(q_a.dtype) @ q_a).square() @ (1 / scale).T
    common = None
    if len(precision.eigenvalues) > 1:
        q, values = precision.eigenvectors[1][0], precision.eigenvalues[1][0]
        common = (q / (values + precision.deltas[1])) @ q.T
    return Axes(q_g, along, common, phi.dtype)


@full_precision
def dense_last_layer_covariance(phi: Tensor, covariance: Tensor, dim: int) -> Tensor:
    """Covariance under a dense posterior covariance of ``[W.flatten(), b]``.

    Args:
        phi: Features, shape (B, F).
        covariance: Shape (P, P).
        dim: Number D of outputs.

    Returns:
        Shape (B, D, D).
    """
    width = phi.shape[1]
    weights = dim * width
    by_layer = covariance[:weights, :weights].view(dim, width, dim, width)
    out = torch.einsum("bf,kflg,bg->bkl", phi, by_layer, phi)
    if covariance.shape[0] > weights:
        mixed = torch.einsum("bf,kfl->bkl", phi, covariance[:weights, weights:].view(dim, width, dim))
        out = out + mixed + mixed.mT + covariance[weights:, weights:]
    return out
