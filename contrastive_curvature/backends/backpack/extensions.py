"""Extensions of our own, exact for every fix: indefinite and coupled output Hessians too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from torch import nn

from contrastive_curvature.backends.backpack.factors import SignedFactor, factor_hessian
from contrastive_curvature.backends.backpack.layers import Layer, check_layer, known_layers, refuse
from contrastive_curvature.backends.backpack.loss import check_unit_inputs, hessian_of
from contrastive_curvature.backends.backpack.rules import parameter_diagonal, parameter_factor
from contrastive_curvature.loss import ContrastiveLoss

__all__ = ["CurvatureFactor", "DiagCurvature"]

_Rule = Callable[[Any, Any, str, SignedFactor], Any]


class _SignedExtension(SecondOrderBackpropExtension):
    """Propagates the columns of a signed factor of the output Hessian."""

    def __init__(self, savefield: str, rule: _Rule) -> None:
        modules: dict[type[nn.Module], ModuleExtension] = {
            kind: _SignedModule(layer, rule) for kind, layer in known_layers().items()
        }
        modules[ContrastiveLoss] = _SignedLoss()
        super().__init__(savefield=savefield, module_exts=modules, fail_mode="ERROR")

    def accumulate_backpropagated_quantities(self, existing: SignedFactor, other: SignedFactor) -> SignedFactor:
        """Sum what arrives over the branches of a network."""
        return SignedFactor(existing.columns + other.columns, existing.signs)


class DiagCurvature(_SignedExtension):
    """Diagonal of the generalised Gauss-Newton ``J^T H J`` of :class:`~contrastive_curvature.ContrastiveLoss`.

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
    the same for all parameters, so the factors of several, side by side, are that of their joint curvature.

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
        if getattr(module, "padding", None) == "same" or getattr(module, "padding", None) == "valid":
            refuse(type(module).__name__, module, "BackPACK takes numbers as padding only")

    def backpropagate(self, ext: Any, module: Any, g_inp: Any, g_out: Any, backproped: SignedFactor) -> SignedFactor:
        columns = self.derivatives.jac_t_mat_prod(module, g_inp, g_out, backproped.columns)
        return SignedFactor(columns, backproped.signs)

    def _parameter(self, name: str, rule: _Rule) -> Callable[..., Any]:
        def compute(_: Any, module: Any, *arguments: Any) -> Any:
            found = rule(self.derivatives, module, name, arguments[-1])
            if isinstance(found, SignedFactor):
                return SignedFactor(found.columns.detach(), found.signs)
            return found.detach()

        return compute


class _SignedLoss(ModuleExtension):
    def check_hyperparameters_module_extension(self, ext: Any, module: Any, g_inp: Any, g_out: Any) -> None:
        if getattr(module, "input1", 0) is None:
            del module.input1
        check_unit_inputs(module, keeps_residual=False)

    def backpropagate(self, ext: Any, module: Any, g_inp: Any, g_out: Any, backproped: Any) -> SignedFactor:
        factor = factor_hessian(hessian_of(module))
        return SignedFactor(factor.columns.to(module.input0.dtype), factor.signs.to(module.input0.dtype))
