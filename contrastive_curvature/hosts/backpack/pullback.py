"""The pullback by BackPACK's derivatives: matrix columns, all at once, from the raw outputs to every parameter."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.ggn.finite import check_finite
from contrastive_curvature.ggn.kron import by_position, check_matrix, layer_inputs, zero_factors
from contrastive_curvature.hessian.blocks import NodeBlocks
from contrastive_curvature.hosts.backpack.agreement import (
    POINTS,
    attempt,
    autograd_product,
    check_outputs,
    check_product,
    random_cotangents,
)
from contrastive_curvature.hosts.backpack.cross import LayerSide, layer_side, linear_cross, product_cross
from contrastive_curvature.hosts.backpack.factors import SignedFactor, factor_blocks
from contrastive_curvature.hosts.backpack.layers import ADVICE
from contrastive_curvature.hosts.backpack.network import Network
from contrastive_curvature.hosts.backpack.rules import parameter_diagonal, parameter_products
from contrastive_curvature.network import pullback
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.pullback import KronFactors, Points, Pullback
from contrastive_curvature.options import Structure

__all__ = ["BackPackPullback"]


class BackPackPullback(Pullback):
    """All trainable parameters of an encoder, by BackPACK's Jacobian products, layer by layer.

    Args:
        encoder: The analysed encoder.

    Raises:
        UnsupportedError: BackPACK has no derivatives of a layer, the forward cannot be traced, or a parameter is used
            twice (the message names the layer), or the parameters are in half precision.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder: Encoder = encoder
        self.network = Network(encoder)
        self.params = self.network.params
        low = {p.dtype for p in encoder.parameters()} & {torch.float16, torch.bfloat16}
        if low:
            msg = (
                f"backend BackPACK: parameters in {low.pop()}, while the output Hessian is computed in float32. Call "
                "model.float() first."
            )
            raise UnsupportedError(msg)
        self.n_params = sum(p.numel() for p in self.params)
        self._checked = False

    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        """See :meth:`Pullback.forward`; the context is the batch itself.

        Raises:
            UnsupportedError: A mapping, or the traced network gives other outputs or gradients than the encoder.
        """
        if isinstance(x, Mapping):
            msg = f"backend BackPACK: a batch that is a mapping; the host's layers take one tensor. {ADVICE}"
            raise UnsupportedError(msg)
        with torch.no_grad():
            z = self.encoder(x)
            self._compare(x, z)
        return z, x

    def slice_context(self, context: Any, rows: slice) -> Any:
        """See :meth:`Pullback.slice_context`."""
        return context[rows]

    def vjp(self, context: Any, cotangents: Tensor) -> Tensor:
        """See :meth:`Pullback.vjp`."""
        n, many = cotangents.shape[:2]
        out = cotangents.new_zeros(n, many, self.n_params)
        if not n or not many:
            return out
        pieces = self._pieces(out)
        for step, columns in self._backward(context, cotangents.transpose(0, 1)):
            for name, k in step.params:
                found = parameter_products(step.derivatives, step.module, name, columns, sum_batch=False)
                pieces[k].copy_(found.transpose(0, 1).flatten(2))
        return out

    def vjp_sum(self, x: Inputs, cotangents: Tensor) -> Tensor:
        """``sum_i J_i^T v_i`` for cotangents (N, D): one pass, shape (P,)."""
        out = cotangents.new_zeros(self.n_params)
        pieces = self._pieces(out)
        for step, columns in self._backward(x, cotangents.unsqueeze(0)):
            for name, k in step.params:
                found = parameter_products(step.derivatives, step.module, name, columns, sum_batch=True)
                pieces[k].copy_(found.flatten())
        return out

    def block_term(self, points: Points, blocks: NodeBlocks, structure: Structure) -> Tensor:
        """See :meth:`Pullback.block_term`; the diagonal without a Jacobian of any point."""
        if structure is not Structure.DIAG:
            return super().block_term(points, blocks, structure)
        out = self._zeros(points.u, structure)
        pieces = self._pieces(out)
        for rows in self._row_chunks(points):
            factor = factor_blocks(blocks[rows])
            for step, columns in self._backward(self.slice_context(points.context, rows), factor.columns):
                here = SignedFactor(columns, factor.signs)
                for name, k in step.params:
                    pieces[k].add_(parameter_diagonal(step.derivatives, step.module, name, here).flatten())
        return out

    def cross_term(self, rows: Points, columns: Points, y: Tensor, structure: Structure) -> Tensor:
        """See :meth:`Pullback.cross_term`; the diagonal layer by layer."""
        if structure is not Structure.DIAG:
            return super().cross_term(rows, columns, y, structure)
        out = self._zeros(rows.u, structure)
        if not len(rows) or not len(columns):
            return out
        pieces = self._pieces(out)
        left = self._sides(rows)
        right = left if rows is columns else self._sides(columns)
        for (step, a), (_, b) in zip(left, right, strict=True):
            names = [name for name, _ in step.params]
            found = linear_cross(a, b, y, names) if a.columns is not None else {}
            for name, k in step.params:
                term = found[name] if found else product_cross(a.products[name], b.products[name], y)
                pieces[k].add_(term)
        return out

    def _sides(self, points: Points) -> list[tuple[Any, LayerSide]]:
        tangents = points.tangents(slice(None)).transpose(0, 1)
        return [(step, layer_side(step, columns)) for step, columns in self._backward(points.context, tangents)]

    def kron_factors(self, points: Points, blocks: NodeBlocks, n_data: int) -> KronFactors:
        """See :meth:`Pullback.kron_factors`.

        Raises:
            UnsupportedError: A matrix belongs to neither a linear layer nor an ungrouped convolution.
        """
        for step in self.network.steps:
            for name, k in step.params:
                check_matrix(step.module, name, self.params[k])
        factors = [zero_factors(p) for p in self.params]
        for rows in self._row_chunks(points):
            factor = factor_blocks(blocks[rows])
            signs = factor.signs.flatten()
            for step, columns in self._backward(self.slice_context(points.context, rows), factor.columns):
                for name, k in step.params:
                    if self.params[k].ndim == 1:
                        moved = parameter_products(step.derivatives, step.module, name, columns, sum_batch=False)
                        flat = moved.flatten(0, 1)
                        factors[k][0] += flat.T @ (signs.unsqueeze(1) * flat)
                        continue
                    at_positions = by_position(step.module, columns.flatten(0, 1))
                    inputs = layer_inputs(step.module, step.module.input0).flatten(0, 1)
                    flat = at_positions.flatten(0, 1)
                    repeated = signs.repeat_interleave(at_positions.shape[1]).unsqueeze(1)
                    factors[k][0] += flat.T @ (repeated * flat)
                    factors[k][1] += inputs.T @ inputs / (n_data * at_positions.shape[1])
        return factors

    def _backward(self, x: Any, columns: Tensor) -> Any:
        """Run a batch and pull columns (C, N, D) back; yields the layers with trainable parameters."""
        with torch.no_grad():
            self._compare(x)
            network, _ = self._run(x)
            yield from network.layers(columns)

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        """Views of the last axis, one a parameter."""
        return list(flat.split([p.numel() for p in self.params], dim=-1))

    def _row_chunks(self, points: Points) -> list[slice]:
        """Points such that the columns at a layer stay within bounds."""
        n, dim = points.u.shape
        # Other layers than linear ones make a gradient of every point, one column at a time if need be.
        gradients = [
            self.params[k].numel()
            for step in self.network.steps
            if not isinstance(step.module, nn.Linear)
            for _, k in step.params
        ]
        size = max(1, pullback.JACOBIAN_ELEMENTS // max(1, dim * self.network.width, *gradients))
        return [slice(k, min(k + size, n)) for k in range(0, n, size)]

    def _compare(self, x: Tensor, z: Tensor | None = None) -> None:
        """Once, on the first batch: what a trace does not see would make every Jacobian that of another function.

        Raises:
            UnsupportedError: Outputs or a product are not the encoder's, or the host fails.
            InputError: Autograd's own product is not finite.
        """
        if self._checked:
            return
        z = self.encoder(x) if z is None else z
        # Nothing to compare; who takes the outputs refuses what is not finite.
        if not z.numel() or not bool(z.isfinite().all()):
            return
        few, v = x[:POINTS], random_cotangents(z[:POINTS])
        # The products of this one do not come back here; nor does another thread take ours before they are compared.
        unchecked = copy.copy(self)
        unchecked._checked = True
        check_outputs(attempt("the traced network", lambda: self._run(x)[1]), z)
        wanted = attempt("autograd", lambda: autograd_product(self.encoder, self.params, few, v))
        check_finite(wanted, self, "the first batch")
        check_product(attempt("a product with the Jacobian", lambda: unchecked.vjp_sum(few, v)), wanted)
        # Point by point the host takes other rules; compared with itself, for two points, as this may be large.
        few, v = few[:2], v[:2]
        wanted = unchecked.vjp_sum(few, v)
        each = attempt("a product with the Jacobians", lambda: unchecked.vjp(few, v.unsqueeze(1)).sum((0, 1)))
        check_product(each, wanted)
        self._checked = True

    def _run(self, x: Tensor) -> tuple[Network, Tensor]:
        """A network that has run a batch, and its raw outputs."""
        network = self.network.own()
        z = network.run(x)
        self.network.width = network.width
        return network, z
