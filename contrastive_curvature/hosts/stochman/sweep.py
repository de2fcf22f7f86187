"""One backward sweep of ``M = B^T H B`` through a network by StochMan's rules, as far as StochMan has them.

``B`` (D, O) is the Jacobian of the outputs with respect to what a layer gives, so ``M`` is (O, O) for every point. The
sweep says which layers it leaves out, and why: these are left to the code for any network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hosts.stochman.convert import counterpart, leaves, refuse
from contrastive_curvature.hosts.stochman.rules import RefusedError, Rule, find_rule
from contrastive_curvature.network import pullback as limits
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.layerwise import LayerwisePullback
from contrastive_curvature.options import Structure

__all__ = ["StochManPullback", "Sweep", "feature_maps", "owners"]

_POINTS = 8
"""Points of the first batch on which the outputs of StochMan's layers are compared with the encoder's."""

WIDEST = 1024
"""Numbers of a point between two layers for a full ``M``: StochMan multiplies matrices of that size for every point."""


def feature_maps(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Return the input, and the output of every layer."""
    maps = [x]
    for layer in layers:
        maps.append(layer(maps[-1]))
    return maps


class Sweep:
    """A sweep, planned on the first point of a batch.

    Args:
        layers: Layers of StochMan that run one after another, private to the caller.
        x: Points (N, *input), at least one.
        wanted: Indices of the layers whose parameters are asked for; -1 for the input of the network.
        names: Of the layers in messages, where not their indices.
        shape: ``"diagonal"`` or ``"block"``: what is asked for of each.
        approximate: Whether only the diagonal of ``M`` goes from layer to layer (``speed="fast"``).
        diagonal: Whether ``M`` at the outputs is given by its diagonal.

    Attributes:
        reasons: Which of them are left out, and why.
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
        self.names = [str(k) for k in range(len(layers))] if names is None else names
        self.reasons: dict[int, str] = {}
        self._weights: dict[int, Rule] = {}
        self._inputs: dict[int, Rule] = {}
        self._held = 1
        with torch.no_grad():
            self._plan(feature_maps(layers, x[:1]), shape == "diagonal", approximate, diagonal)
        if -1 not in wanted or -1 in self.reasons:
            # Further down there is nothing to do.
            self._inputs = {k: rule for k, rule in self._inputs.items() if k > min(self._weights, default=len(layers))}

    def _plan(self, maps: list[Tensor], diag_out: bool, approximate: bool, diagonal: bool) -> None:
        for k in reversed(range(len(self.layers))):
            if not any(j <= k for j in self.wanted):
                return
            x, cut = maps[k], diag_out if k == 0 else approximate
            try:
                self._check_width(maps[k + 1], diagonal)
                if k in self.wanted:
                    self._plan_weights(k, x, maps[k + 1][0].numel(), diagonal, diag_out)
                if any(j < k for j in self.wanted):
                    self._check_width(x, cut)
                    self._inputs[k] = find_rule("input", self.layers[k], x, diag_inp=diagonal, diag_out=cut)
            except RefusedError as error:
                left = [j for j in self.wanted if j not in self._weights and j not in self.reasons]
                self.reasons |= dict.fromkeys(left, self._reason(k, error))
                return
            diagonal = cut

    def _plan_weights(self, k: int, x: Tensor, width: int, diagonal: bool, diag_out: bool) -> None:
        layer = self.layers[k]
        count = sum(p.numel() for p in layer.parameters())
        # StochMan forms (P, P) for the diagonal of a convolution too.
        held = count if diag_out and (diagonal or isinstance(layer, nn.Linear)) else count * (count + width)
        try:
            if held > limits.JACOBIAN_ELEMENTS:
                msg = f"StochMan would hold {held} numbers for every point"
                raise RefusedError(msg)  # noqa: TRY301  as one from the rule
            self._weights[k] = find_rule("weight", layer, x, diag_inp=diagonal, diag_out=diag_out)
            self._held = max(self._held, held)
        except RefusedError as error:
            self.reasons[k] = self._reason(k, error)

    def _check_width(self, values: Tensor, diagonal: bool) -> None:
        width = values[0].numel()
        if not diagonal and width > WIDEST:
            msg = f"M is kept for up to {WIDEST} numbers a point, and here are {width}"
            raise RefusedError(msg)
        self._held = max(self._held, width if diagonal else width**2)

    def _reason(self, k: int, error: RefusedError) -> str:
        return f"layer {self.names[k]!r} ({type(self.layers[k]).__name__}): {error}"

    def run(self, x: Tensor, m: Callable[[slice], Tensor]) -> tuple[dict[int, Tensor], Tensor | None]:
        """Sweep points (N, *input); ``m`` gives ``M`` at the outputs of some of them, (n, D, D) or its diagonal (n, D).

        Returns:
            By index of the layer the sum over points of ``J^T M J`` for its parameters: (P_l,) or (P_l, P_l). And that
            of every point for the input: (N, I) or (N, I, I); ``None`` where it was not asked for or is left out.
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
                        found = self._weights[k](layer, maps[k], maps[k + 1], here).sum(0)
                        total[k] = total[k] + found if k in total else found
                    if k not in self._inputs:
                        break
                    here = self._inputs[k](layer, maps[k], maps[k + 1], here)
                else:
                    ends.append(here)
        return total, torch.cat(ends) if ends and -1 in self.wanted else None


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
        """See :meth:`Pullback.block_term`."""
        if structure is not Structure.DIAG or not len(context):
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
    """Return indices of the layers that share no parameter: shared ones have a square of a sum of Jacobians."""
    runs = list(layers)
    times = Counter(id(p) for layer in runs for p in layer.parameters())
    return [k for k, layer in enumerate(runs) if all(times[id(p)] == 1 for p in layer.parameters())]


def _raw_leaves(encoder: Encoder) -> list[tuple[str, nn.Module]]:
    """Return the layers up to the raw outputs, without the normalisation that the encoder looks through."""
    found = list(leaves(encoder.model))
    if encoder.normalization is None:
        return found
    runs = [k for k, (_, leaf) in enumerate(found) if leaf is encoder.normalization]
    if len(runs) <= encoder.normalization_run:
        refuse("", encoder.normalization, "normalises the outputs in the midst of another layer")
    return found[: runs[encoder.normalization_run]]
