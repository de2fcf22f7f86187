"""BackPACK's own extensions, started from columns that are given instead of from a loss that they know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from backpack.core.derivatives.basederivatives import BaseLossDerivatives
from backpack.extensions import KFLR, DiagGGNExact, SqrtGGNExact
from backpack.extensions.secondorder.diag_ggn.losses import DiagGGNLoss
from backpack.extensions.secondorder.hbp.losses import HBPLoss
from backpack.extensions.secondorder.sqrt_ggn.losses import SqrtGGNBaseLossModule
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from contrastive_curvature.hessian.blocks import SignedFactor
from contrastive_curvature.hessian.sphere import L2Norm
from contrastive_curvature.hosts.backpack.host_modules import host_modules

__all__ = ["GivenColumns", "diag_ggn", "host_knows", "kflr", "signed_columns", "sqrt_ggn"]


class GivenColumns(_Loss):
    """Stands for a loss whose Hessian at point i is ``sum_c v_ic v_ic^T``; it has no value.

    Args:
        columns: ``v``, shape (C, N, D).
        z: The outputs at which the loss stands, shape (N, D), as the network's last layer put them out.
    """

    def __init__(self, columns: Tensor, z: Tensor) -> None:
        super().__init__(reduction="sum")
        self.columns = columns
        self.input0 = z
        self.output = z.new_zeros(())


class _GivenDerivatives(BaseLossDerivatives):
    def hessian_is_psd(self) -> bool:
        return True

    def _sqrt_hessian(self, module: Any, g_inp: Any, g_out: Any, subsampling: list[int] | None = None) -> Tensor:
        return module.columns if subsampling is None else module.columns[:, subsampling]


def diag_ggn() -> Any:
    """The host's ``DiagGGNExact`` that takes given columns: ``sum_ic (J_i^T v_ic)^2`` in every parameter's shape."""
    return _prepared(DiagGGNExact(), DiagGGNLoss(_GivenDerivatives()), "DiagGGN")


def sqrt_ggn() -> Any:
    """The host's ``SqrtGGNExact`` that takes given columns: ``J_i^T v_ic``, shape (C, N, *parameter)."""
    return _prepared(SqrtGGNExact(), SqrtGGNBaseLossModule(_GivenDerivatives()), "SqrtGGN")


def kflr() -> Any:
    """The host's ``KFLR`` that takes given columns."""
    return _prepared(KFLR(), HBPLoss(_GivenDerivatives()), "HBP")


def host_knows(kind: type[nn.Module], extension: Any) -> bool:
    """Whether one of the host's extensions has a rule for a class of layers."""
    return kind in extension._BackpropExtension__module_extensions


def signed_columns(factor: SignedFactor) -> Iterator[tuple[float, Tensor]]:
    """The positive and the negative part of blocks, as columns of which the host squares each.

    Args:
        factor: Of N blocks: columns (C, N, D), signs (C, N).

    Yields:
        A sign and columns (K, N, D), for each of the two parts that is not zero.
    """
    sizes = factor.columns.square().sum(2)
    # A projection leaves negative parts of the size of rounding, which are not worth a pass.
    counts = sizes > 4 * torch.finfo(sizes.dtype).eps * sizes.max()
    for sign in (1.0, -1.0):
        has = counts & (factor.signs * sign > 0)
        kept = has.any(1)
        if bool(kept.any()):
            yield sign, factor.columns[kept] * has[kept].unsqueeze(2)


def _prepared(extension: Any, loss: Any, name: str) -> Any:
    extension.set_module_extension(GivenColumns, loss)
    # Registered or not: an adapter does without.
    extension.set_module_extension(L2Norm, host_modules()[name][1], overwrite=True)
    return extension
