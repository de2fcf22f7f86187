"""The pullback to all trainable parameters of a network that StochMan's layers can express."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.ggn.kron import refuse_kron
from contrastive_curvature.hessian.blocks import NodeBlocks
from contrastive_curvature.hosts.stochman.composite import Sequential
from contrastive_curvature.hosts.stochman.convert import convert
from contrastive_curvature.hosts.stochman.kron import LayerKron
from contrastive_curvature.hosts.stochman.layer import SandwichLayer
from contrastive_curvature.network import pullback as limits
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.pullback import KronFactors, Points, Pullback
from contrastive_curvature.options import Structure

__all__ = ["NetworkPullback", "StochManPullback", "leaves"]


class NetworkPullback(Pullback):
    """Some parameters of a network of this package's layers.

    Args:
        network: From :func:`~contrastive_curvature.hosts.stochman.to_nnj`, giving raw outputs (N, D).
        params: The parameters, in the order of the answer; those that the network does not use have no curvature.
    """

    def __init__(self, network: Sequential, params: list[nn.Parameter]) -> None:
        self.network = network
        self.params = params
        self.slots: dict[int, slice] = {}
        start = 0
        for p in params:
            self.slots[id(p)] = slice(start, start + p.numel())
            start += p.numel()
        self.n_params = start
        used = [p for leaf in leaves(network) for p in leaf.parameters()]
        # With one parameter in two layers, its Jacobian is a sum, whose square is not the sum of squares.
        self.shares = len({id(p) for p in used}) < len(used)
        self._width = max(self.n_params, sum(p.numel() for p in used))

    @property
    def width(self) -> int:
        """See :class:`Pullback`."""
        return self._width

    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        """See :meth:`Pullback.forward`; the context is the batch itself."""
        with torch.no_grad():
            maps = self.network.feature_maps(_tensor(x))
        # Cotangents of wide feature maps may outgrow the parameters.
        self._width = max(self._width, *(t[0].numel() for t in maps if len(t)), 0)
        return maps[-1], x

    def slice_context(self, context: Any, rows: slice) -> Any:
        """See :meth:`Pullback.slice_context`."""
        return _tensor(context)[rows]

    def vjp(self, context: Any, cotangents: Tensor) -> Tensor:
        """See :meth:`Pullback.vjp`."""
        x = _tensor(context)
        out = cotangents.new_zeros(*cotangents.shape[:2], self.n_params)
        if not out.numel():
            return out

        def visit(leaf: SandwichLayer, at: Tensor, v: Tensor) -> None:
            self._scatter(leaf, lambda: leaf._pull_weight(at, v), out)

        with torch.no_grad():
            self.network._walk(x, cotangents, visit, to_input=False)
        return out

    def block_term(self, points: Points, blocks: NodeBlocks, structure: Structure) -> Tensor:
        """See :meth:`Pullback.block_term`; the diagonal by one backward sweep of ``M = B^T H B``, kept as factors.

        ``B`` is the Jacobian of the raw outputs with respect to a layer's, (D, O): with D of a few numbers and O of
        thousands, ``M`` is never formed.
        """
        if structure is not Structure.DIAG or self.shares:
            return super().block_term(points, blocks, structure)
        out = self._zeros(points.u, structure)
        dim = points.u.shape[1]
        eye = torch.eye(dim, dtype=points.u.dtype, device=points.u.device)
        step = max(1, limits.JACOBIAN_ELEMENTS // max(1, self.width * dim))
        for start in range(0, len(points), step):
            rows = slice(start, min(start + step, len(points)))
            here = blocks[rows]

            def visit(leaf: SandwichLayer, at: Tensor, b: Tensor, here: NodeBlocks = here) -> None:
                curved = here.matmul(b.flatten(2)).view_as(b)
                self._scatter(leaf, lambda: leaf._weight_diagonal(at, b, curved), out)

            with torch.no_grad():
                x = self.slice_context(points.context, rows)
                self.network._walk(x, eye.expand(len(x), dim, dim), visit, to_input=False)
        return out

    def cross_term(self, rows: Points, columns: Points, y: Tensor, structure: Structure) -> Tensor:
        """See :meth:`Pullback.cross_term`; the diagonal layer by layer, which a linear one has cheaper."""
        if structure is not Structure.DIAG or self.shares:
            return super().cross_term(rows, columns, y, structure)
        out = self._zeros(rows.u, structure)
        for axes in self._axis_chunks(max(len(rows), len(columns)), rows.u.shape[1]):
            right = self._cotangents(columns, axes)
            left = right if rows is columns else self._cotangents(rows, axes)
            for (leaf, x, v), (_, w, t) in zip(left, right, strict=True):
                with torch.no_grad():
                    self._scatter(leaf, partial(leaf._cross_diagonal, (x, v), (w, t), y), out)
        return out

    def _cotangents(self, points: Points, axes: slice) -> list[tuple[SandwichLayer, Tensor, Tensor]]:
        """Layers with parameters, their inputs, and ``P_i e_k / n_i`` pulled back to their outputs."""
        found: list[tuple[SandwichLayer, Tensor, Tensor]] = []
        with torch.no_grad():
            self.network._walk(
                _tensor(points.context), points.tangents(axes), lambda *seen: found.append(seen), to_input=False
            )
        return found

    def kron_factors(self, points: Points, blocks: NodeBlocks, n_data: int) -> KronFactors:
        """See :meth:`Pullback.kron_factors` and :mod:`contrastive_curvature.ggn.kron`, whose convention this is."""
        if self.shares:
            refuse_kron("a parameter is shared between layers")
        with torch.no_grad():
            return LayerKron(self.network, self.params).factors(_tensor(points.context), blocks, n_data)

    def _scatter(self, leaf: SandwichLayer, make: Callable[[], Tensor], out: Tensor) -> None:
        """Add what a layer has for its parameters, joined, to where each of them stands."""
        if not any(id(p) in self.slots for p in leaf.parameters()):
            return
        sizes = [p.numel() for p in leaf.parameters()]
        for p, piece in zip(leaf.parameters(), make().split(sizes, dim=-1), strict=True):
            if id(p) in self.slots:
                out[..., self.slots[id(p)]] += piece


class StochManPullback(NetworkPullback):
    """All trainable parameters of an encoder, which is converted to StochMan's layers.

    Args:
        encoder: The analysed encoder, in evaluation mode.

    Raises:
        UnsupportedError: A layer has no counterpart, or the raw outputs lie inside of one.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(_raw_network(encoder), [p for p in encoder.parameters() if p.requires_grad])
        self.encoder: Encoder = encoder

    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        """See :class:`NetworkPullback`.

        Raises:
            InputError: The layers cannot take inputs of this shape or dtype.
        """
        with self.encoder.naming(x):
            return super().forward(x)


def _raw_network(encoder: Encoder) -> Sequential:
    """The layers that make the raw outputs, without the normalisation that the encoder looks through."""
    return Sequential(*(made for _, made in convert(encoder.model, until=encoder.tap, run=encoder.tap_run))).eval()


def leaves(network: Sequential) -> list[SandwichLayer]:
    """Every layer with parameters, as often as it runs."""
    found: list[SandwichLayer] = []
    for module in network.children():
        inner = getattr(module, "inner", None)
        if isinstance(inner, Sequential):
            found += leaves(inner)
        elif isinstance(module, SandwichLayer) and next(module.parameters(), None) is not None:
            found.append(module)
    return found


def _tensor(x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        msg = "StochMan: its layers take one tensor, not a mapping. Use backend=ContrastiveGGN (torch.func)."
        raise UnsupportedError(msg)
    return x
