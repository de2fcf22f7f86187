"""Our own extensions, exact for every fix, also for indefinite and coupled output Hessians."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from torch import Tensor, nn

from contrastive_curvature.hessian.blocks import SignedFactor
from contrastive_curvature.hosts.backpack.extension_registry import drop_empty_labels
from contrastive_curvature.hosts.backpack.layers import Layer, check_layer, known_layers, refuse
from contrastive_curvature.hosts.backpack.module_derivatives import check_unit_inputs, hessian_of
from contrastive_curvature.losses.cosine import CosineLoss
from contrastive_curvature.network import pullback

_Rule = Callable[[Any, Any, str, SignedFactor], Any]

_Factors = dict[int, SignedFactor]
"""What is propagated: the factor of every loss, by a number of its own.

Columns of one factor add up where branches meet; those of different ones stand side by side.
"""

_numbers = itertools.count()


class SignedExtension(SecondOrderBackpropExtension):
    """Propagates the columns of a signed factor of the output Hessian."""

    def __init__(self, savefield: str, rule: _Rule) -> None:
        modules: dict[type[nn.Module], ModuleExtension] = {
            kind: _SignedModule(layer, rule) for kind, layer in known_layers().items()
        }
        super().__init__(savefield=savefield, module_exts=modules, fail_mode="ERROR")

    def __call__(self, module: nn.Module, g_inp: Any, g_out: Any) -> None:
        """Run the rule of a module; one rule serves all classes of losses, while the host looks up by class."""
        if isinstance(module, CosineLoss):
            _SignedLoss()(self, module, g_inp, g_out)
        else:
            super().__call__(module, g_inp, g_out)

    def start(self, z: Tensor, factor: SignedFactor) -> None:
        """Start from a factor at outputs ``z`` instead of a loss."""
        self.saved_quantities.save_quantity(z.data_ptr(), {0: factor}, self.accumulate_backpropagated_quantities)

    def accumulate_backpropagated_quantities(self, existing: _Factors, other: _Factors) -> _Factors:
        """Sum the factors from several branches of a network, loss by loss."""
        both = {
            k: SignedFactor(existing[k].columns + other[k].columns, existing[k].signs) for k in existing.keys() & other
        }
        every = existing | other | both
        # Sorted by loss, so that the order is the same for all parameters.
        return {k: every[k] for k in sorted(every)}


class DiagCurvature(SignedExtension):
    """Diagonal of the generalised Gauss-Newton ``J^T H J`` for any :class:`~contrastive_curvature.losses.PairLoss`.

    Exact and unclamped for every ``distance`` and ``pd_fix``: an indefinite ``H`` keeps its signs, and a coupled ``H``
    is summed over the batch before it is squared. The result has the shape of the parameter.

    Args:
        savefield: Attribute of a parameter that gets the result.
    """

    def __init__(self, savefield: str = "diag_curvature") -> None:
        super().__init__(savefield, _parameter_diagonal)


class CurvatureFactor(SignedExtension):
    """Signed factor ``F`` of the generalised Gauss-Newton: ``J^T H J = F^T diag(signs) F``.

    A parameter gets an object with ``columns``, shape (R, *parameter), and ``signs``, shape (R,). R and its order are
    the same for all parameters, so the concatenated factors of several parameters are the factor of their joint
    curvature. Several losses in one backward pass concatenate their rows, for parameters that all losses reach.

    Args:
        savefield: Attribute of a parameter that gets the result.
    """

    def __init__(self, savefield: str = "curvature_factor") -> None:
        super().__init__(savefield, _parameter_factor)


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
            of_losses = [rule(self.derivatives, module, name, factor) for factor in arguments[-1].values()]
            if isinstance(of_losses[0], SignedFactor):
                columns = torch.cat([each.columns for each in of_losses])
                return SignedFactor(columns.detach(), torch.cat([each.signs for each in of_losses]))
            return sum(of_losses[1:], start=of_losses[0]).detach()

        return compute


class _SignedLoss(ModuleExtension):
    def check_hyperparameters_module_extension(self, ext: Any, module: Any, g_inp: Any, g_out: Any) -> None:
        drop_empty_labels(module)
        check_unit_inputs(module)

    def backpropagate(self, ext: Any, module: Any, g_inp: Any, g_out: Any, backproped: Any) -> _Factors:
        factor = hessian_of(module).signed_factor()
        cast = SignedFactor(factor.columns.to(module.input0.dtype), factor.signs.to(module.input0.dtype))
        # The loss may be one weighted term of the number that backward() was called on.
        return {next(_numbers): cast.scaled(g_out[0].detach().to(cast.columns.dtype))}


def _parameter_products(derivatives: Any, module: Any, name: str, columns: Tensor, sum_batch: bool) -> Tensor:
    """Return ``B^T v``, (C, *parameter) or (C, N, *parameter); ``B`` is the Jacobian of a layer in one parameter."""
    if isinstance(module, (nn.Conv1d, nn.Conv2d)) and name == "weight" and module.groups == 1:
        # BackPACK's own rule is slow: it convolves with one group for each column, point and channel.
        x = derivatives.get_unfolded_input(module)
        products = torch.einsum(f"cnot,nkt->c{'' if sum_batch else 'n'}ok", columns.flatten(3), x)
        return products.reshape(*products.shape[:-2], *module.weight.shape)
    return derivatives.param_mjp(name, module, None, None, columns, sum_batch=sum_batch)


def _parameter_diagonal(derivatives: Any, module: Any, name: str, factor: SignedFactor) -> Tensor:
    """Return the diagonal ``sum sign (B^T v)^2`` of the curvature of one parameter, in its shape."""
    p: Tensor = getattr(module, name)
    columns, signs = factor.columns, factor.signs
    if isinstance(module, nn.Linear) and columns.ndim == 3 and not factor.sums_batch:
        x: Any = module.input0
        spread = torch.einsum("cn,cno->no", signs, columns.square())
        return spread.T @ x.detach().square() if name == "weight" else spread.sum(0)
    out = columns.new_zeros(p.shape)
    each = p.numel() * (1 if factor.sums_batch else columns.shape[1])
    step = max(1, pullback.JACOBIAN_ELEMENTS // max(1, each))
    for start in range(0, columns.shape[0], step):
        part = slice(start, start + step)
        moved = _parameter_products(derivatives, module, name, columns[part], factor.sums_batch)
        out += torch.tensordot(signs[part], moved.square(), dims=signs.ndim)
    return out


def _parameter_factor(derivatives: Any, module: Any, name: str, factor: SignedFactor) -> SignedFactor:
    """Return the signed factor of the curvature of one parameter: R = C or R = C N columns (R, *parameter)."""
    moved = _parameter_products(derivatives, module, name, factor.columns, factor.sums_batch)
    rows = math.prod(factor.signs.shape)
    return SignedFactor(moved.reshape(rows, *getattr(module, name).shape), factor.signs.flatten())
