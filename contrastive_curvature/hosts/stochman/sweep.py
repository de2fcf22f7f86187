"""One backward sweep of ``M = B^T H B`` through a network by StochMan's rules.

``B`` (D, O) is the Jacobian of the network's outputs in the outputs of a layer, so ``M`` is (O, O) for every point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hosts.stochman.convert import counterpart, leaves, refuse
from contrastive_curvature.hosts.stochman.rules import RefusedError, Rule, find_rule
from contrastive_curvature.network import pullback as limits
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.layerwise import LayerwisePullback

_POINTS = 8
"""Points of the first batch on which the outputs of StochMan's layers are compared with the encoder's."""

WIDEST = 1024
"""Numbers of a point between two layers of an exact sweep: StochMan multiplies matrices of that size for each point."""


def feature_maps(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Return the input, and the output of every layer."""
    maps = [x]
    for layer in layers:
        maps.append(layer(maps[-1]))
    return maps


class Sweep:
    """A sweep, planned on the first point of a batch.

    Args:
        layers: Layers of StochMan that run one after another, used only by the caller.
        x: Points (N, *input), at least one.
        wanted: Indices of the layers whose parameters get a result; -1 for the input of the network.
        names: Names of the layers in messages; by default their indices.
        shape: Form of each result, ``"diagonal"`` or ``"block"``.
        approximate: Whether only the diagonal of ``M`` is passed from layer to layer (``speed="fast"``).
        diagonal: Whether ``M`` at the outputs is passed as its diagonal.

    Raises:
        RefusedError: A layer has no rule, or StochMan would hold too much; the message names the layer.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        x: Tensor,
        wanted: Collection[int],
        *,
        names: Sequence[str] | None = None,
        shape: str = "diagonal",
        approximate: bool = False,
        diagonal: bool = False,
    ) -> None:
        self.layers, self.wanted = layers, wanted
        self._diag_out = shape == "diagonal"
        self._weights: dict[int, Rule] = {}
        self._inputs: dict[int, Rule] = {}
        self._most = limits.JACOBIAN_ELEMENTS if approximate else WIDEST**2
        self._held = 1
        with torch.no_grad():
            maps = feature_maps(layers, x[:1])
            for k in reversed(range(max(0, min(wanted)), len(layers))):
                cut = self._diag_out if k == 0 else approximate
                try:
                    self._plan(k, maps[k], maps[k + 1], diagonal, cut)
                except RefusedError as error:
                    name = str(k) if names is None else names[k]
                    raise RefusedError(f"layer {name!r} ({type(layers[k]).__name__}): {error}") from None
                diagonal = cut

    def _plan(self, k: int, x: Tensor, out: Tensor, diagonal: bool, cut: bool) -> None:
        layer, width, below = self.layers[k], out[0].numel(), x[0].numel()
        self._hold(width if diagonal else width**2)
        if k in self.wanted:
            count = sum(p.numel() for p in layer.parameters())
            # StochMan forms (P, P) for the diagonal of a convolution too.
            short = self._diag_out and (diagonal or isinstance(layer, nn.Linear))
            self._hold(count if short else count * (count + width))
            self._weights[k] = find_rule("weight", layer, x, diag_inp=diagonal, diag_out=self._diag_out)
        if k > min(self.wanted):
            self._hold(below if cut else below**2)
            self._inputs[k] = find_rule("input", layer, x, diag_inp=diagonal, diag_out=cut)

    def _hold(self, numbers: int) -> None:
        if numbers > self._most:
            raise RefusedError(f"StochMan would hold {numbers} numbers for every point, more than {self._most}")
        self._held = max(self._held, numbers)

    def run(self, x: Tensor, m: Callable[[slice], Tensor]) -> dict[int, Tensor]:
        """Sweep points (N, *input); ``m`` returns ``M`` at the outputs of n points, (n, D, D) or a diagonal (n, D).

        Returns:
            By layer index, the sum over points of ``J^T M J`` for its trainable parameters: (P_l,) or (P_l, P_l). Under
            -1, ``J^T M J`` of every point for the input: (N, I) or (N, I, I).
        """
        total: dict[int, Tensor] = {}
        ends: list[Tensor] = []
        step = max(1, limits.JACOBIAN_ELEMENTS // self._held)
        with torch.no_grad():
            for start in range(0, len(x), step):
                rows = slice(start, start + step)
                maps, here = feature_maps(self.layers, x[rows]), m(rows)
                for k, layer in reversed(list(enumerate(self.layers))):
                    if k in self._weights:
                        curvature = self._weights[k](layer, maps[k], maps[k + 1], here).sum(0)
                        total[k] = total[k] + curvature if k in total else curvature
                    if k in self._inputs:
                        here = self._inputs[k](layer, maps[k], maps[k + 1], here)
                ends.append(here)
        for k, value in total.items():
            flags = [torch.full((p.numel(),), p.requires_grad, device=p.device) for p in self.layers[k].parameters()]
            chosen = torch.cat(flags)
            total[k] = value[chosen] if self._diag_out else value[chosen][:, chosen]
        return {**total, -1: torch.cat(ends)} if -1 in self.wanted else total


class StochManPullback(LayerwisePullback):
    """All trainable parameters of an encoder; StochMan's rules for ``J^T M J`` give the diagonal.

    The blocks ``sum_i J_i^T H_ii J_i`` of a diagonal come from one backward sweep by StochMan's rules, each compared
    with autograd before its first use. If StochMan has no exact rule for a layer (:attr:`reasons`), the code for any
    network computes the diagonal; it always computes cross terms and other structures.

    Args:
        encoder: The analysed encoder, in evaluation mode.

    Raises:
        UnsupportedError: StochMan has no counterpart of a layer, or the raw outputs lie inside a layer.

    Attributes:
        reasons: The layer without an exact rule, and the reason; empty before the first curvature or if every layer has
            one.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(encoder)
        named = _raw_leaves(encoder)
        self.reasons: list[str] = []
        self._host_names = [name for name, _ in named]
        self._host_layers = [counterpart(layer, name) for name, layer in named]
        self._sweep: Sweep | None = None

    @override
    def diag(self, context: Any, blocks: Blocks) -> Tensor:
        if len(context):
            if self._sweep is None and not self.reasons:
                self._plan(context)
            if self._sweep is not None:
                by_layer = self._sweep.run(context, lambda rows: blocks[rows].dense())
                return torch.cat([by_layer[k] for k in sorted(by_layer)])
        return super().diag(context, blocks)

    def _plan(self, x: Tensor) -> None:
        layers = self._host_layers
        with torch.no_grad():
            computed, wanted = feature_maps(layers, x[:_POINTS])[-1], self.encoder(x[:_POINTS])
        tolerance = 1e-8 if wanted.dtype == torch.float64 else 1e-3
        if computed.shape != wanted.shape or not bool(
            (computed - wanted).abs().max() <= tolerance * wanted.abs().max()
        ):
            raise UnsupportedError(
                "StochMan: its layers give other outputs than the encoder. Use backend=ContrastiveGGN (torch.func)."
            )
        trainable = [k for k, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters())]
        shared = [k for k in trainable if k not in owners(layers)]
        if shared:
            self.reasons = [f"layer {self._host_names[k]!r}: it shares a parameter with another" for k in shared]
            return
        try:
            self._sweep = Sweep(layers, x, trainable, names=self._host_names)
        except RefusedError as error:
            self.reasons = [str(error)]


def owners(layers: Iterable[nn.Module]) -> list[int]:
    """Return indices of the layers that share no parameter; a shared one needs the square of a sum of Jacobians."""
    runs = list(layers)
    times = Counter(id(p) for layer in runs for p in layer.parameters())
    return [k for k, layer in enumerate(runs) if all(times[id(p)] == 1 for p in layer.parameters())]


def _raw_leaves(encoder: Encoder) -> list[tuple[str, nn.Module]]:
    """Return the layers up to the raw outputs, without the normalisation at the end."""
    every = list(leaves(encoder.model))
    if encoder.normalization is None:
        return every
    runs = [k for k, (_, leaf) in enumerate(every) if leaf is encoder.normalization]
    if len(runs) <= encoder.place.run:
        refuse("", encoder.normalization, "normalises the outputs in the midst of another layer")
    return every[: runs[encoder.place.run]]
