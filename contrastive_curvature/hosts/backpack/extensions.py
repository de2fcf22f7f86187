"""Extensions of our own, exact for every fix: indefinite and coupled output Hessians too."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from torch import nn

from contrastive_curvature.hessian.blocks import SignedFactor
from contrastive_curvature.hosts.backpack.layers import Layer, check_layer, known_layers, refuse
from contrastive_curvature.hosts.backpack.loss import check_unit_inputs, hessian_of
from contrastive_curvature.hosts.backpack.rules import parameter_diagonal, parameter_factor
from contrastive_curvature.hosts.backpack.subclasses import known_losses

__all__ = ["CurvatureFactor", "DiagCurvature"]

_Rule = Callable[[Any, Any, str, SignedFactor], Any]

_Factors = dict[int, SignedFactor]
"""What is propagated: the factor of every loss, by a number of its own.

Columns of one factor add up where branches meet; those of different ones stand side by side.
"""

_numbers = itertools.count()


class _SignedExtension(SecondOrderBackpropExtension):
    """Propagates the columns of a signed factor of the output Hessian."""

    def __init__(self, savefield: str, rule: _Rule) -> None:
        modules: dict[type[nn.Module], ModuleExtension] = {
            kind: _SignedModule(layer, rule) for kind, layer in known_layers().items()
        }
        modules.update(dict.fromkeys(known_losses(), _SignedLoss()))
        super().__init__(savefield=savefield, module_exts=modules, fail_mode="ERROR")

    def accumulate_backpropagated_quantities(self, existing: _Factors, other: _Factors) -> _Factors:
        """Sum what arrives over the branches of a network, loss by loss."""
        both = {
            k: SignedFactor(existing[k].columns + other[k].columns, existing[k].signs) for k in existing.keys() & other
        }
        every = existing | other | both
        # In the order of the losses, which is then the same for all parameters.
        return {k: every[k] for k in sorted(every)}


class DiagCurvature(_SignedExtension):
    """Diagonal of the generalised Gauss-Newton ``J^T H J`` of any :class:`~contrastive_curvature.losses.PairLoss`.

    Exact and unclamped for every ``distance`` and ``pd_fix``: an indefinite ``H`` keeps its signs, a coupled one is
    summed over the batch before it is squared. Stored with the shape of the parameter.

    Args:
        savefield: Attribute of a parameter that gets the result.
    """

    def __init__(self, savefield: str = "diag_curvature") -> None:
        super().__init__(savefield, parameter_diagonal)


class CurvatureFactor(_SignedExtension):
    """Signed factor ``F`` of the generalised Gauss-Newton: ``J^T H J = F^T diag(signs) F``.

    A parameter gets an object with ``columns``, shape (R, *parameter), and ``signs``, shape (R,). R and its order are
    the same for all parameters, so the factors of several, side by side, are that of their joint curvature. Several
    losses in one backward pass put their rows below one another, in parameters that all of them reach.

    Args:
        savefield: Attribute of a parameter that gets the result.
    """

    def __init__(self, savefield: str = "curvature_factor") -> None:
        super().__init__(savefield, parameter_factor)


class _SignedModule(ModuleExtension):
    def __init__(self, layer: Layer, rule: _Rule) -> None:
        self.derivatives = layer.derivatives
        for name in layer.params:
            setattr(self, name, self._parameter(name, rule))
        super().__init__(list(layer.params))

    def check_hyperparameters_module_extension(self, ext: Any, module: Any, g_inp: Any, g_out: Any) -> None:
        check_layer(type(module).__name__, module)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            refuse(type(module).__name__, module, "in training mode it couples the points; call model.eval()")
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            refuse(type(module).__name__, module, "in training mode it is another network each time; call model.eval()")

    def backpropagate(self, ext: Any, module: Any, g_inp: Any, g_out: Any, backproped: _Factors) -> _Factors:
        def pulled(factor: SignedFactor) -> SignedFactor:
            return SignedFactor(self.derivatives.jac_t_mat_prod(module, g_inp, g_out, factor.columns), factor.signs)

        return {k: pulled(factor) for k, factor in backproped.items()}

    def _parameter(self, name: str, rule: _Rule) -> Callable[..., Any]:
        def compute(_: Any, module: Any, *arguments: Any) -> Any:
            found = [rule(self.derivatives, module, name, factor) for factor in arguments[-1].values()]
            if isinstance(found[0], SignedFactor):
                columns = torch.cat([each.columns for each in found])
                return SignedFactor(columns.detach(), torch.cat([each.signs for each in found]))
            return sum(found[1:], start=found[0]).detach()

        return compute


class _SignedLoss(ModuleExtension):
    def check_hyperparameters_module_extension(self, ext: Any, module: Any, g_inp: Any, g_out: Any) -> None:
        if getattr(module, "input1", 0) is None:
            del module.input1
        check_unit_inputs(module, keeps_residual=False)

    def backpropagate(self, ext: Any, module: Any, g_inp: Any, g_out: Any, backproped: Any) -> _Factors:
        factor = hessian_of(module).signed_factor()
        columns, signs = factor.columns.to(module.input0.dtype), factor.signs.to(module.input0.dtype)
        # The loss may be a part of what backward() was called on, with a weight.
        scale = g_out[0].detach().to(columns.dtype)
        return {next(_numbers): SignedFactor(columns * scale.abs().sqrt(), signs * scale.sign())}
