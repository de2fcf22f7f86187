"""Our losses and our normalisation, as module extensions for each of BackPACK's own second-order extensions."""

from __future__ import annotations

from typing import Any

import torch
from backpack.extensions.curvature import Curvature
from backpack.extensions.curvmatprod.ggnmp.ggnmpbase import GGNMPBase
from backpack.extensions.curvmatprod.ggnmp.losses import GGNMPLoss
from backpack.extensions.curvmatprod.hmp.hmpbase import HMPBase
from backpack.extensions.curvmatprod.hmp.losses import HMPLoss
from backpack.extensions.curvmatprod.pchmp.losses import PCHMPLoss
from backpack.extensions.secondorder.diag_ggn.diag_ggn_base import DiagGGNBaseModule
from backpack.extensions.secondorder.diag_ggn.losses import DiagGGNLoss
from backpack.extensions.secondorder.diag_hessian.diag_h_base import DiagHBaseModule
from backpack.extensions.secondorder.diag_hessian.losses import DiagHLoss
from backpack.extensions.secondorder.hbp.hbpbase import HBPBaseModule
from backpack.extensions.secondorder.hbp.losses import HBPLoss
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule
from backpack.extensions.secondorder.sqrt_ggn.losses import SqrtGGNBaseLossModule
from torch import Tensor

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.blocks import SignedFactor
from contrastive_curvature.hosts.backpack.l2norm import L2NormDerivatives
from contrastive_curvature.hosts.backpack.loss import PairLossDerivatives, check_unit_inputs

__all__ = ["host_modules"]


class _Checks:
    """Before any extension looks at the loss."""

    keeps_residual = False

    def check_hyperparameters_module_extension(self, ext: Any, module: Any, g_inp: Any, g_out: Any) -> None:
        if getattr(module, "input1", 0) is None:
            # Pairs came by keyword and `None` for the labels by position; the host would ask it for its gradient.
            del module.input1
        kind = ext.get_curv_type() if hasattr(ext, "get_curv_type") else Curvature.GGN
        check_unit_inputs(module, self.keeps_residual or kind != Curvature.GGN)


class _SqrtGGNLoss(_Checks, SqrtGGNBaseLossModule):
    pass


class _DiagGGNLoss(_Checks, DiagGGNLoss):
    pass


class _HBPLoss(_Checks, HBPLoss):
    """KFAC and KFLR need a square root; KFRA sums the blocks, so that its factors may be indefinite."""

    def backpropagate(self, ext: Any, module: Any, g_inp: Any, g_out: Any, backproped: Any) -> Tensor:
        # The host asks the derivatives once for all losses whether they are convex; ours depends on the options, and
        # the square roots refuse by themselves. KFRA needs none.
        return self.make_loss_hessian_func(ext)(module, g_inp, g_out)


class _GGNMPLoss(_Checks, GGNMPLoss):
    pass


class _HMPLoss(_Checks, HMPLoss):
    keeps_residual = True


class _PCHMPLoss(_Checks, PCHMPLoss):
    keeps_residual = True

    def backpropagate(self, ext: Any, module: Any, g_inp: Any, g_out: Any, backproped: Any) -> Any:
        self.derivatives.require_psd(module)
        return lambda mat: self.derivatives.make_hessian_mat_prod(module, g_inp, g_out)(mat)


class _DiagHessianLoss(_Checks, DiagHLoss):
    """With ``arccos`` and ``fixed`` the Hessian of the loss in which every pair holds one of its points still.

    ``euclidean`` leaves out the second derivative of the normalisation, here as everywhere.
    """

    keeps_residual = True

    def backpropagate(self, ext: Any, module: Any, g_inp: Any, g_out: Any, backproped: Any) -> dict[str, list[Any]]:
        return _split(self.derivatives.require_uncoupled(module).blocks.signed_factor())


class _HBPL2Norm(HBPBaseModule):
    def backpropagate_batch_average(self, ext: Any, module: Any, g_inp: Any, g_out: Any, H: Tensor) -> Tensor:
        if ext.get_curv_type() != Curvature.GGN:
            msg = (
                f"L2Norm: {type(ext).__name__} averages the second derivatives of element-wise layers only. Use KFRA, "
                "KFLR or KFAC, which leave them out."
            )
            raise UnsupportedError(msg)
        return self.derivatives.ea_jac_t_mat_jac_prod(module, g_inp, g_out, H)


class _DiagHessianL2Norm(DiagHBaseModule):
    def backpropagate(self, ext: Any, module: Any, g_inp: Any, g_out: Any, backproped: Any) -> dict[str, list[Any]]:
        if module.input0.ndim != 2:
            msg = "L2Norm: DiagHessian goes through it for inputs of shape (N, D) only. Flatten them first."
            raise UnsupportedError(msg)
        own = _split(self.derivatives.residual_blocks(module, g_out).signed_factor())
        pulled = [self.derivatives.jac_t_mat_prod(module, g_inp, g_out, mat) for mat in backproped["matrices"]]
        return {"matrices": pulled + own["matrices"], "signs": backproped["signs"] + own["signs"]}


def host_modules() -> dict[str, tuple[Any, Any]]:
    """Module extensions for a pair loss and for the normalisation, by name of the host's extension class.

    Returns:
        For every name two instances; the second is ``None`` where the host takes element-wise layers only.
    """
    loss, norm = PairLossDerivatives(), L2NormDerivatives()
    diag_ggn = (_DiagGGNLoss(loss), DiagGGNBaseModule(norm))
    diag_hessian = (_DiagHessianLoss(loss), _DiagHessianL2Norm(norm))
    return {
        "SqrtGGN": (_SqrtGGNLoss(loss), SqrtGGNBaseModule(norm)),
        "DiagGGN": diag_ggn,
        "BatchDiagGGN": diag_ggn,
        "HBP": (_HBPLoss(loss), _HBPL2Norm(norm)),
        "GGNMP": (_GGNMPLoss(loss), GGNMPBase(norm)),
        "HMP": (_HMPLoss(loss), HMPBase(norm)),
        "PCHMP": (_PCHMPLoss(loss), None),
        "DiagHessian": diag_hessian,
        "BatchDiagHessian": diag_hessian,
    }


def _split(factor: SignedFactor) -> dict[str, list[Any]]:
    """The host's form of a signed factor: a matrix for each sign."""
    signs = factor.signs.unsqueeze(2)
    zero = torch.zeros_like(factor.columns)
    plus, minus = (torch.where(signs * sign > 0, factor.columns, zero) for sign in (1, -1))
    return {"matrices": [plus, minus], "signs": [DiagHBaseModule.PLUS, DiagHBaseModule.MINUS]}
