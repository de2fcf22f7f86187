"""The pullback by curvlinops: products of operators, and its K-FAC where it has one."""

from __future__ import annotations

import torch
from curvlinops._torch_base import PyTorchLinearOperator
from torch import Tensor

from contrastive_curvature.backends.curvlinops.kfac import host_factors, host_refuses
from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.ggn.kron import ModuleKron
from contrastive_curvature.ggn.module import ModulePullback
from contrastive_curvature.ggn.pullback import JACOBIAN_ELEMENTS, KronFactors, Points
from contrastive_curvature.node_blocks import NodeBlocks
from contrastive_curvature.options import Structure

__all__ = ["DIAGONAL_PARAMETERS", "CurvlinopsPullback"]

DIAGONAL_PARAMETERS = 2**12
"""So many products at most are spent on an exact diagonal."""


class CurvlinopsPullback(ModulePullback):
    """All trainable parameters; the terms of a point are columns of a curvlinops operator.

    A matrix-free operator gives its diagonal only column by column, so exact diagonals are for small networks.
    """

    def block_term(self, points: Points, blocks: NodeBlocks, structure: Structure) -> Tensor:
        """See :meth:`Pullback.block_term`.

        Raises:
            UnsupportedError: A diagonal of more parameters than :data:`DIAGONAL_PARAMETERS`.
        """
        if structure is Structure.DIAG and self.n_params > DIAGONAL_PARAMETERS:
            msg = (
                f"structure 'diag' with {self.n_params} parameters: curvlinops takes an exact diagonal column by "
                f"column, for at most {DIAGONAL_PARAMETERS} parameters. Use backend=ContrastiveGGN (torch.func), or an "
                "estimator such as curvlinops.hutchinson_diag on ContrastiveGGNLinearOperator."
            )
            raise UnsupportedError(msg)
        out = self._zeros(points.u, structure)
        operator = _BlockOperator(self, points, blocks)
        step = max(1, JACOBIAN_ELEMENTS // max(1, points.u.numel() + self.n_params))
        for start in range(0, self.n_params, step):
            stop = min(start + step, self.n_params)
            unit = points.u.new_zeros(self.n_params, stop - start)
            unit[start:stop].fill_diagonal_(1)
            columns = operator @ unit
            if structure is Structure.DIAG:
                out[start:stop] = columns[start:stop].diagonal()
            else:
                out[:, start:stop] = columns
        return out

    def kron_factors(self, points: Points, blocks: NodeBlocks, n_data: int) -> KronFactors:
        """See :meth:`Pullback.kron_factors`; the host's own where its squared loss can stand for the blocks."""
        kron = ModuleKron(self.encoder)
        # An unused layer has no gradient, which the host's backward pass trips over.
        if blocks.is_psd() and host_refuses(self.encoder) is None and self._all_used(points):
            return host_factors(self.encoder, points.context, blocks, n_data)
        return kron.factors(points.context, blocks, n_data)

    def _all_used(self, points: Points) -> bool:
        with torch.enable_grad():
            z = self.encoder(self.slice_context(points.context, slice(0, 1)))
            trainable = [p for p in self.encoder.parameters() if p.requires_grad]
            found = torch.autograd.grad(z.sum(), trainable, allow_unused=True)
        return all(g is not None for g in found)


class _BlockOperator(PyTorchLinearOperator):
    """``sum_i J_i^T H_ii J_i`` of some points."""

    SELF_ADJOINT = True

    def __init__(self, pullback: CurvlinopsPullback, points: Points, blocks: NodeBlocks) -> None:
        self.pullback, self.points, self.blocks = pullback, points, blocks
        super().__init__([(pullback.n_params,)], [(pullback.n_params,)])

    @property
    def device(self) -> torch.device:
        return self.points.u.device

    @property
    def dtype(self) -> torch.dtype:
        return self.points.u.dtype

    def _matmat(self, columns: list[Tensor]) -> list[Tensor]:
        x = self.points.context
        moved = torch.stack([self.pullback.jvp(x, v)[1] for v in columns[0].T], dim=2)
        curved = self.blocks.matmul(moved)
        return [torch.stack([self.pullback.vjp_sum(x, curved[..., k]) for k in range(curved.shape[2])], dim=1)]
