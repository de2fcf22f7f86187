"""The pullback to all trainable parameters of a network of StochMan's layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hosts.stochman.convert import counterpart, leaves, refuse
from contrastive_curvature.hosts.stochman.sweep import Sweep, feature_maps
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.options import Structure

__all__ = ["StochManPullback", "owners"]

_POINTS = 8
"""Points of the first batch on which the outputs of StochMan's layers are compared with the encoder's."""


class StochManPullback(LayerwisePullback):
    """All trainable parameters of an encoder; its diagonal by StochMan's sandwiches.

    The blocks ``sum_i J_i^T H_ii J_i`` of a diagonal come from one backward sweep by StochMan's rules, each compared
    with autograd before its first use. What StochMan has no exact rule for (:attr:`reasons`), cross terms and other
    structures are those of the code for any network.

    Args:
        encoder: The analysed encoder, in evaluation mode.

    Raises:
        UnsupportedError: StochMan has no counterpart of a layer, or the raw outputs lie inside of one.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(encoder)
        named = _raw_leaves(encoder)
        self._host_names = [name for name, _ in named]
        self._host_layers = [counterpart(layer, name) for name, layer in named]
        self._sweep: Sweep | None = None
        self._rest: LayerwisePullback | None = None

    @property
    def reasons(self) -> list[str]:
        """Layers whose diagonal is left to the code for any network, and why; empty before the first curvature."""
        return [] if self._sweep is None else list(self._sweep.reasons.values())

    def block_term(self, context: Any, blocks: Blocks, structure: Structure) -> Tensor:
        """See :meth:`Pullback.block_term`.

        Raises:
            UnsupportedError: StochMan's layers give other outputs than the encoder.
        """
        if structure is not Structure.DIAG or self._values_kept or not len(context):
            return super().block_term(context, blocks, structure)
        found, _ = self._planned(context).run(context, lambda rows: blocks[rows].dense())
        out = blocks.u.new_zeros(self.n_params)
        places = dict(zip(map(id, self.trainable), self.split(out), strict=True))
        for k, value in found.items():
            params = list(self._host_layers[k].parameters())
            for p, piece in zip(params, value.split([p.numel() for p in params]), strict=True):
                if id(p) in places:
                    places.pop(id(p)).copy_(piece)
        if places:
            if self._rest is None:
                names = {name for name, p in zip(self.names, self.trainable, strict=True) if id(p) in places}
                self._rest = LayerwisePullback(self.encoder, only=names)
            rest = self._rest.block_term(context, blocks, structure)
            for p, piece in zip(self._rest.trainable, self._rest.split(rest), strict=True):
                places[id(p)].copy_(piece)
        return out

    def _planned(self, x: Tensor) -> Sweep:
        if self._sweep is None:
            layers = self._host_layers
            self._check_outputs(x[:_POINTS])
            trainable = {k for k, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters())}
            self._sweep = Sweep(layers, x, trainable.intersection(owners(layers)), names=self._host_names)
        return self._sweep

    def _check_outputs(self, x: Tensor) -> None:
        with torch.no_grad():
            found, wanted = feature_maps(self._host_layers, x)[-1], self.encoder(x)
        tolerance = 1e-8 if wanted.dtype == torch.float64 else 1e-3
        if found.shape != wanted.shape or not bool((found - wanted).abs().max() <= tolerance * wanted.abs().max()):
            msg = "StochMan: its layers give other outputs than the encoder. Use backend=ContrastiveGGN (torch.func)."
            raise UnsupportedError(msg)


def owners(layers: Iterable[nn.Module]) -> list[int]:
    """Numbers of the layers that share no parameter with another: the square of a sum of Jacobians is that of none."""
    runs = list(layers)
    times = Counter(id(p) for layer in runs for p in layer.parameters())
    return [k for k, layer in enumerate(runs) if all(times[id(p)] == 1 for p in layer.parameters())]


def _raw_leaves(encoder: Encoder) -> list[tuple[str, nn.Module]]:
    """The layers that make the raw outputs, without the normalisation that the encoder looks through."""
    found = list(leaves(encoder.model))
    if encoder.normalization is None:
        return found
    runs = [k for k, (_, leaf) in enumerate(found) if leaf is encoder.normalization]
    if len(runs) <= encoder.normalization_run:
        refuse("", encoder.normalization, "normalises the outputs in the midst of another layer")
    return found[: runs[encoder.normalization_run]]
