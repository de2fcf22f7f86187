"""Our losses and our normalisation in BackPACK's own second-order extensions."""

from __future__ import annotations

import functools
from typing import Any

import torch
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.curvature import Curvature
from backpack.extensions.curvmatprod import GGNMP, HMP, PCHMP
from backpack.extensions.curvmatprod.ggnmp.ggnmpbase import GGNMPBase
from backpack.extensions.curvmatprod.ggnmp.losses import GGNMPLoss
from backpack.extensions.curvmatprod.hmp.hmpbase import HMPBase
from backpack.extensions.curvmatprod.hmp.losses import HMPLoss
from backpack.extensions.curvmatprod.pchmp.losses import PCHMPLoss
from backpack.extensions.secondorder.diag_ggn import BatchDiagGGN, DiagGGN
from backpack.extensions.secondorder.diag_ggn.diag_ggn_base import DiagGGNBaseModule
from backpack.extensions.secondorder.diag_ggn.losses import DiagGGNLoss
from backpack.extensions.secondorder.diag_hessian import BatchDiagHessian, DiagHessian
from backpack.extensions.secondorder.diag_hessian.diag_h_base import DiagHBaseModule
from backpack.extensions.secondorder.diag_hessian.losses import DiagHLoss
from backpack.extensions.secondorder.hbp import HBP
from backpack.extensions.secondorder.hbp.hbpbase import HBPBaseModule
from backpack.extensions.secondorder.hbp.losses import HBPLoss
from backpack.extensions.secondorder.sqrt_ggn import SqrtGGN
from backpack.extensions.secondorder.sqrt_ggn.base import SqrtGGNBaseModule
from backpack.extensions.secondorder.sqrt_ggn.losses import SqrtGGNBaseLossModule
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.blocks import SignedFactor
from contrastive_curvature.hessian.sphere import L2Norm
from contrastive_curvature.hosts.backpack.module_derivatives import (
    L2NormDerivatives,
    PairLossDerivatives,
    check_unit_inputs,
    products,
    require_hessian,
)
from contrastive_curvature.losses.cosine import CosineLoss


def drop_empty_labels(loss: nn.Module) -> None:
    """Delete labels that were passed as ``None`` by position: BackPACK would ask for their gradient."""
    if getattr(loss, "input1", 0) is None:
        del loss.input1


def call(extension: Any, module: nn.Module, g_inp: Any, g_out: Any) -> None:
    """Run a second-order extension on a module; for a loss of cosines or ``L2Norm`` without a rule, use ours."""
    ours = None
    if type(module) not in extension._BackpropExtension__module_extensions:
        loss, norm = _rules_for(extension.__class__)
        ours = loss if isinstance(module, CosineLoss) else norm if type(module) is L2Norm else None
    if ours is None:
        BackpropExtension.__call__(extension, module, g_inp, g_out)
        return
    if isinstance(module, CosineLoss):
        drop_empty_labels(module)
        if _is_positive_curvature(extension):
            raise UnsupportedError(
                f"{type(extension).__name__}: this curvature is defined for losses that are convex in the outputs, and "
                f"{type(module).__name__}, a loss of cosines, is not. Use GGNMP(), KFLR() or KFRA() with pd_fix='psd', "
                "or HMP() with pd_fix='full', which multiplies with the Hessian."
            )
        if not isinstance(extension, _HESSIANS):
            check_unit_inputs(module)
    ours(extension, module, g_inp, g_out)


@functools.cache
def _rules_for(extension: type) -> tuple[Any, Any]:
    """Return the rules for a loss and for the normalisation; ``None`` if an extension cannot have them."""
    loss, norm = PairLossDerivatives(), L2NormDerivatives()
    rules: dict[tuple[type, ...], tuple[Any, Any]] = {
        (SqrtGGN,): (SqrtGGNBaseLossModule(loss), SqrtGGNBaseModule(norm)),
        (DiagGGN, BatchDiagGGN): (DiagGGNLoss(loss), DiagGGNBaseModule(norm)),
        (HBP,): (_HBPLoss(loss), _HBPL2Norm(norm)),
        (GGNMP,): (GGNMPLoss(loss), GGNMPBase(norm)),
        (HMP,): (_HMPLoss(loss), HMPBase(norm)),
        # Refused for our losses; it supports only element-wise layers.
        (PCHMP,): (PCHMPLoss(loss), None),
        (DiagHessian, BatchDiagHessian): (_DiagHessianLoss(loss), _DiagHessianL2Norm(norm)),
    }
    return next((both for kinds, both in rules.items() if issubclass(extension, kinds)), (None, None))


_HESSIANS = (HMP, DiagHessian, BatchDiagHessian)
"""Extensions that add the second derivatives of the layers to those of the loss."""


def _is_positive_curvature(extension: Any) -> bool:
    """Return whether an extension adds a part of the layers' second derivatives, or an average of them."""
    return isinstance(extension, PCHMP) or (isinstance(extension, HBP) and extension.get_curv_type() != Curvature.GGN)


class _HBPLoss(HBPLoss):
    """KFAC and KFLR need a square root; KFRA sums the blocks, so its factors may be indefinite."""

    def backpropagate(self, ext: Any, module: Any, g_inp: Any, g_out: Any, backproped: Any) -> Tensor:
        # The host asks each class of losses once whether it is convex. Ours depends on the options; the square roots
        # refuse by themselves, and KFRA needs no root.
        return self.make_loss_hessian_func(ext)(module, g_inp, g_out)


# The layers add their second derivatives times the gradient of the number that backward() was called on. So the Hessian
# of the loss has the same factor, which the host's rules for other losses leave out.
class _HMPLoss(HMPLoss):
    def backpropagate(self, ext: Any, module: Any, g_inp: Any, g_out: Any, backproped: Any) -> Any:
        hessian, factor = require_hessian(module, ext), g_out[0].detach()
        return lambda mat: factor * products(hessian, mat)


class _DiagHessianLoss(DiagHLoss):
    def backpropagate(self, ext: Any, module: Any, g_inp: Any, g_out: Any, backproped: Any) -> dict[str, list[Any]]:
        hessian = require_hessian(module, ext, by_point=True)
        return _split(hessian.blocks.signed_factor().scaled(g_out[0].detach()))


class _HBPL2Norm(HBPBaseModule):
    def backpropagate_batch_average(self, ext: Any, module: Any, g_inp: Any, g_out: Any, H: Tensor) -> Tensor:
        if ext.get_curv_type() != Curvature.GGN:
            raise UnsupportedError(
                f"L2Norm: {type(ext).__name__} averages the second derivatives of element-wise layers only. Use KFRA, "
                "KFLR or KFAC, which leave them out."
            )
        return self.derivatives.ea_jac_t_mat_jac_prod(module, g_inp, g_out, H)


class _DiagHessianL2Norm(DiagHBaseModule):
    def backpropagate(self, ext: Any, module: Any, g_inp: Any, g_out: Any, backproped: Any) -> dict[str, list[Any]]:
        if module.input0.ndim != 2:
            raise UnsupportedError(
                "L2Norm: DiagHessian goes through it for inputs of shape (N, D) only. Flatten them first."
            )
        own = _split(self.derivatives.residual_blocks(module, g_out).signed_factor())
        pulled = [self.derivatives.jac_t_mat_prod(module, g_inp, g_out, mat) for mat in backproped["matrices"]]
        return {"matrices": pulled + own["matrices"], "signs": backproped["signs"] + own["signs"]}


def _split(factor: SignedFactor) -> dict[str, list[Any]]:
    """Return a signed factor in the host's form: a matrix for each sign."""
    signs = factor.signs.unsqueeze(2)
    zero = torch.zeros_like(factor.columns)
    plus, minus = (torch.where(signs * sign > 0, factor.columns, zero) for sign in (1, -1))
    return {"matrices": [plus, minus], "signs": [DiagHBaseModule.PLUS, DiagHBaseModule.MINUS]}
