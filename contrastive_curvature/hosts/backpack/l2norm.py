"""Derivatives of the l2-normalisation, for BackPACK.

With ``u = z / n`` the Jacobian is ``P / n``, and a gradient ``g`` at the output contributes the residual
``-((g . u) P + P g u^T + u (P g)^T) / n^2``.
"""

from __future__ import annotations

from typing import Any

import torch
from backpack.core.derivatives.basederivatives import BaseDerivatives
from torch import Tensor, nn

from contrastive_curvature.hessian.node_blocks import NodeBlocks
from contrastive_curvature.hessian.sphere import norms
from contrastive_curvature.options import Distance

__all__ = ["L2NormDerivatives"]


class L2NormDerivatives(BaseDerivatives):
    """First and second derivative of :class:`~contrastive_curvature.L2Norm` on inputs (N, ..., D)."""

    def hessian_is_zero(self, module: nn.Module) -> bool:
        """No."""
        return False

    def hessian_is_diagonal(self, module: nn.Module) -> bool:
        """No: the outputs of a point depend on all its inputs."""
        return False

    def residual_blocks(self, module: nn.Module, g_out: tuple[Tensor, ...]) -> NodeBlocks:
        """``sum_k g_k d^2 u_k / dz^2`` of every point, for inputs (N, D).

        Args:
            module: The extended module.
            g_out: Gradient of the loss at its output, shape (N, D).

        Returns:
            N blocks (D, D).
        """
        u, n = _direction(module)
        g, n = g_out[0].detach(), n.squeeze(-1)
        # An arccos block is the same second derivative, of the neighbour sum -g.
        return NodeBlocks.from_sums(u, n, torch.zeros_like(n), -g, Distance.ARCCOS)

    def ea_jac_t_mat_jac_prod(self, module: nn.Module, g_inp: Any, g_out: Any, mat: Tensor) -> Tensor:
        """``1/N sum_i J_i^T mat J_i`` (D, D), for KFRA."""
        u, n = _direction(module)
        eye = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
        jacobian = (eye - u.unsqueeze(-1) * u.unsqueeze(-2)) / n.unsqueeze(-1)
        return torch.einsum("nki,kl,nlj->ij", jacobian, mat, jacobian) / u.shape[0]

    def _jac_mat_prod(self, module: nn.Module, g_inp: Any, g_out: Any, mat: Tensor) -> Tensor:
        return self._jac_t_mat_prod(module, g_inp, g_out, mat)

    def _jac_t_mat_prod(
        self, module: nn.Module, g_inp: Any, g_out: Any, mat: Tensor, subsampling: list[int] | None = None
    ) -> Tensor:
        u, n = _direction(module)
        if subsampling is not None:
            u, n = u[subsampling], n[subsampling]
        return (mat - u * (u * mat).sum(-1, keepdim=True)) / n

    def _residual_mat_prod(self, module: nn.Module, g_inp: Any, g_out: Any, mat: Tensor) -> Tensor:
        u, n = _direction(module)
        g = g_out[0].detach()
        radial = (u * g).sum(-1, keepdim=True)
        tangent = g - u * radial
        along = (u * mat).sum(-1, keepdim=True)
        moved = radial * (mat - u * along) + tangent * along + u * (tangent * mat).sum(-1, keepdim=True)
        return -moved / n / n


def _direction(module: Any) -> tuple[Tensor, Tensor]:
    """Outputs and norms (..., 1); a row of zeros, which the module passes on, counts as norm one."""
    z = module.input0.detach()
    n = norms(z).unsqueeze(-1)
    return module.forward(z), torch.where(n > 0, n, torch.ones_like(n))
