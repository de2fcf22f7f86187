"""Signed factors of the output Hessian: what a host that propagates matrix columns needs of an indefinite matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.blocks import NodeBlocks
from contrastive_curvature.hessian.output import DENSE_LIMIT, OutputHessian

__all__ = ["SignedFactor", "factor_blocks", "factor_hessian"]


@dataclass(frozen=True)
class SignedFactor:
    """Columns ``v_c`` with signs, ``H = sum_c sign_c v_c v_c^T``.

    Args:
        columns: Shape (C, N, ...): C columns of every point, or C columns of the whole batch.
        signs: Shape (C, N) when every point has columns of its own, (C,) when a column runs over the whole batch.
    """

    columns: Tensor
    signs: Tensor

    @property
    def sums_batch(self) -> bool:
        """Whether a column has to be summed over the points before it is squared."""
        return self.signs.ndim == 1


def factor_blocks(blocks: NodeBlocks) -> SignedFactor:
    """Eigenvectors of every block times the root of the absolute eigenvalue, in closed form.

    An orthonormal basis with ``u`` and ``t`` in front leaves one 2 x 2 eigenproblem a point; columns that vanish for
    all points (the radial one of ``euclidean``) are left out.

    Args:
        blocks: N blocks (D, D).

    Returns:
        Columns (C, N, D) with C <= D, signs (C, N).
    """
    n, dim = blocks.u.shape
    if dim == 1:
        values, vectors = blocks.r.unsqueeze(1), blocks.u.unsqueeze(2)
    else:
        u = blocks.u.unsqueeze(2)
        around = _reflection(blocks.u)
        rotated = (around @ blocks.t.unsqueeze(2)).squeeze(2)[:, 1:]
        complement = around[:, :, 1:] @ _reflection(rotated)
        moves = (blocks.t != 0).any(1, keepdim=True)
        t = torch.where(moves, blocks.t, complement[:, :, 0]).unsqueeze(2)
        plane = torch.stack([blocks.r, blocks.q, blocks.q, blocks.c + blocks.p], dim=1).view(n, 2, 2)
        inside, turn = torch.linalg.eigh(plane)
        # The larger in absolute value first, so that what vanishes shares a column.
        order = inside.abs().argsort(dim=1, descending=True)
        inside, turn = inside.gather(1, order), turn.gather(2, order.unsqueeze(1).expand(n, 2, 2))
        vectors = torch.cat([torch.cat([u, t], dim=2) @ turn, complement[:, :, 1:]], dim=2)
        values = torch.cat([inside, blocks.c.unsqueeze(1).expand(n, dim - 2)], dim=1)
    # One column stays where all vanish: convolutions take no empty batches.
    keep = (values != 0).any(0) if bool((values != 0).any()) else torch.arange(dim, device=values.device) == 0
    values, vectors = values[:, keep], vectors[:, :, keep]
    columns = (vectors * values.abs().sqrt().unsqueeze(1)).permute(2, 0, 1)
    return SignedFactor(columns.contiguous(), values.sign().T.contiguous())


def factor_hessian(hessian: OutputHessian) -> SignedFactor:
    """Signed factor of a whole output Hessian.

    Args:
        hessian: Of N points in D dimensions.

    Returns:
        That of the blocks, or, where the points are coupled, C <= N D columns (C, N, D) over the batch, signs (C,).

    Raises:
        UnsupportedError: Coupled and too large for an eigendecomposition.
    """
    if not hessian.coupled:
        return factor_blocks(hessian.blocks)
    n, dim = hessian.z.shape
    if n * dim > DENSE_LIMIT:
        msg = (
            f"pd_fix={str(hessian.options.pd_fix)!r}: the coupled output Hessian of {n} points in {dim} dimensions is "
            "too large for an eigendecomposition. Use pd_fix='psd' or 'fixed', smaller batches, or "
            "contrastive_curvature.ggn(...), which needs none."
        )
        raise UnsupportedError(msg)
    values, vectors = torch.linalg.eigh(hessian.dense())
    size = values.abs().max() if values.numel() else values.sum()
    keep = values.abs() > torch.finfo(values.dtype).eps * size
    keep[-1:] = True
    columns = (vectors[:, keep] * values[keep].abs().sqrt()).T.reshape(-1, n, dim)
    return SignedFactor(columns, values[keep].sign())


def _reflection(v: Tensor) -> Tensor:
    """Householder reflections (N, D, D) whose first column is parallel to ``v`` (N, D), a unit vector or zero."""
    w = v.clone()
    w[:, 0] += torch.where(v[:, 0] < 0, -1.0, 1.0).to(v.dtype)
    w = w / w.norm(dim=1, keepdim=True)
    eye = torch.eye(v.shape[1], dtype=v.dtype, device=v.device)
    return eye - 2 * w.unsqueeze(2) * w.unsqueeze(1)
