"""Networks of layers: one after another, and around one another.

A network is walked backwards once, whatever the number of pairs: with cotangents (exact), or with the matrix
``M = B^T H B`` between layers, full (exact) or cut down to its diagonal after every layer (an approximation).
"""

from __future__ import annotations

from typing import Any

import torch
from stochman import nnj
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.hosts.stochman.layer import SandwichLayer, SandwichVisitor, Visitor

__all__ = ["Residual", "Sequential"]


class _Composite(SandwichLayer):
    """A layer made of layers: its weights are theirs, in their order."""

    def _pull_weight(self, x: Tensor, cotangents: Tensor) -> Tensor:
        found: list[Tensor] = []
        self._walk(x, cotangents, lambda leaf, at, v: found.append(leaf._pull_weight(at, v)), to_input=False)
        return torch.cat(found[::-1], dim=2)

    def _pull_input(self, x: Tensor, cotangents: Tensor) -> Tensor:
        return self._walk(x, cotangents, lambda *_: None)


class Sequential(_Composite, nnj.Sequential):
    """Layers one after another."""

    def __call__(self, x: Tensor, jacobian: Tensor | bool = False) -> Any:
        """Run the network.

        Args:
            x: A batch (B, *input).
            jacobian: ``True``, or a tensor (B, *input, *rest) to multiply the Jacobian with.

        Returns:
            The output, or the pair of it and the Jacobian (B, *output, *input) or (B, *output, *rest).
        """
        if jacobian is not False and (network := _of_own_layers(self)) is not self:
            return network(x, jacobian)
        val = nn.Module.__call__(self, x)
        if isinstance(jacobian, Tensor):
            return val, self._jacobian_wrt_input_mult_left_vec(x, val, jacobian)
        return (val, self._jacobian(x, val)) if jacobian else val

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        return self.feature_maps(x)[-1]

    def feature_maps(self, x: Tensor) -> list[Tensor]:
        """The input, and what every layer makes of it."""
        maps = [x]
        layer: Any
        for layer in self:
            maps.append(layer(maps[-1]))
        return maps

    def _push(self, x: Tensor, tangents: Tensor) -> Tensor:
        network = _of_own_layers(self)
        layer: Any
        for layer, at in zip(network, network.feature_maps(x), strict=False):
            tangents = layer._push(at, tangents)
        return tangents

    def _walk(self, x: Tensor, cotangents: Tensor, visit: Visitor, to_input: bool = True) -> Tensor:
        network = _of_own_layers(self)
        maps = network.feature_maps(x)
        for k in reversed(range(len(network))):
            cotangents = network[k]._walk(maps[k], cotangents, visit, to_input or k > 0)
        return cotangents

    def _sweep(
        self, x: Tensor, val: Tensor, tmp: Tensor, diag_inp: bool, diag_out: bool, visit: SandwichVisitor
    ) -> None:
        network = _of_own_layers(self)
        maps = network.feature_maps(x)
        for k in reversed(range(len(network))):
            network[k]._sweep(maps[k], maps[k + 1], tmp, diag_inp, diag_out, visit)
            if k:
                tmp = network[k]._jacobian_wrt_input_sandwich(maps[k], maps[k + 1], tmp, diag_inp, diag_out)
                diag_inp = diag_out

    def _jacobian_wrt_input_sandwich(
        self, x: Tensor, val: Tensor, tmp: Tensor, diag_inp: bool = False, diag_out: bool = False
    ) -> Tensor:
        return self._input_sandwich(x, tmp, diag_inp, diag_out, approximate=False)

    def _input_sandwich(self, x: Tensor, tmp: Tensor, diag_inp: bool, diag_out: bool, approximate: bool) -> Tensor:
        network = _of_own_layers(self)
        maps = network.feature_maps(x)
        for k in reversed(range(len(network))):
            cut = approximate if k else diag_out
            tmp = network[k]._jacobian_wrt_input_sandwich(maps[k], maps[k + 1], tmp, diag_inp, cut)
            diag_inp = cut
        if not len(network) and diag_inp != diag_out:
            return torch.diag_embed(tmp) if diag_inp else tmp.diagonal(dim1=1, dim2=2)
        return tmp

    def input_sandwich(self, x: Tensor, tmp: Tensor, shape: str = "diagonal", approximate: bool = False) -> Tensor:
        """``J_x^T M J_x`` of every point, by one backward sweep.

        Args:
            x: A batch (B, *input).
            tmp: ``M`` at the outputs: (B, O, O), or its diagonal (B, O).
            shape: ``"diagonal"`` or ``"block"``.
            approximate: See :meth:`sandwich`.

        Returns:
            Shape (B, I), or (B, I, I).
        """
        return self._input_sandwich(x, tmp, tmp.ndim == 2, shape == "diagonal", approximate)

    def sandwich(self, x: Tensor, tmp: Tensor, shape: str = "diagonal", approximate: bool = False) -> list[Tensor]:
        """``J_w^T M J_w`` summed over a batch, by one backward sweep.

        Args:
            x: A batch (B, *input).
            tmp: ``M`` at the outputs: (B, O, O), or its diagonal (B, O).
            shape: ``"diagonal"``: one (P_l,) a layer. ``"block"``: one (P_l, P_l) a layer, weight and bias together.
                ``"full"``: one (P, P), the blocks between layers included.
            approximate: Whether only the diagonal of ``M`` is handed from layer to layer: cheaper, and not exact.

        Returns:
            The tensors, in the order of the layers that have parameters.

        Raises:
            InputError: The shape is unknown, or ``"full"`` is to be approximate.
        """
        if shape not in ("diagonal", "block", "full") or (shape == "full" and approximate):
            wanted = "'diagonal' or 'block'" if approximate else "'diagonal', 'block' or 'full'"
            raise InputError(expected("shape", wanted, shape))
        diagonal = tmp.ndim == 2
        val = self(x)
        if shape == "full":
            whole = self._jacobian_wrt_weight_sandwich(x, val, tmp, diagonal)
            return [] if whole is None else [whole.sum(0)]
        found: list[Tensor] = []

        def visit(leaf: SandwichLayer, at: Tensor, out: Tensor, m: Tensor, is_diagonal: bool) -> None:
            term = leaf._jacobian_wrt_weight_sandwich(at, out, m, is_diagonal, shape == "diagonal")
            if term is not None:
                found.append(term.sum(0))

        self._sweep(x, val, tmp, diagonal, approximate, visit)
        return found[::-1]


class Residual(_Composite):
    """``x + f(x)``.

    Args:
        inner: ``f``, whose outputs have the shape of its inputs; a network of this package's layers, or what
            :func:`~contrastive_curvature.hosts.stochman.to_nnj` can make one of.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner: Any = inner

    def __call__(self, x: Tensor, jacobian: bool = False) -> Any:
        """See :class:`SandwichLayer`; a Jacobian is that of evaluation mode, and so is the value beside it."""
        if jacobian and (inner := _of_own_layers(self.inner)) is not self.inner:
            return Residual(inner)(x, jacobian)
        return super().__call__(x, jacobian)

    def forward(self, x: Tensor) -> Tensor:
        """Run ``f`` and add its input.

        Raises:
            InputError: The outputs of ``f`` have another shape.
        """
        out: Tensor = self.inner(x)
        if out.shape != x.shape:
            raise InputError(expected("Residual", f"inner outputs of shape {tuple(x.shape)}", f"{tuple(out.shape)}"))
        return x + out

    def _push(self, x: Tensor, tangents: Tensor) -> Tensor:
        return tangents + _of_own_layers(self.inner)._push(x, tangents)

    def _walk(self, x: Tensor, cotangents: Tensor, visit: Visitor, to_input: bool = True) -> Tensor:
        pulled = _of_own_layers(self.inner)._walk(x, cotangents, visit, to_input)
        return cotangents + pulled if to_input else pulled

    def _sweep(
        self, x: Tensor, val: Tensor, tmp: Tensor, diag_inp: bool, diag_out: bool, visit: SandwichVisitor
    ) -> None:
        _of_own_layers(self.inner)._sweep(x, val - x, tmp, diag_inp, diag_out, visit)


def _of_own_layers(module: Any) -> Any:
    """The module itself; one of torch's layers, which know no Jacobians, converted.

    Raises:
        UnsupportedError: A layer has no counterpart.
    """
    if _is_own(module):
        return module
    # The converter is made of the classes of this file.
    from contrastive_curvature.hosts.stochman.convert import to_nnj

    return to_nnj(module)


def _is_own(module: Any) -> bool:
    if isinstance(module, Residual):
        return _is_own(module.inner)
    return isinstance(module, SandwichLayer) and (not isinstance(module, Sequential) or all(map(_is_own, module)))
