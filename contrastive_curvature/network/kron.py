"""Kronecker factors of the parameter curvature, every point on its own (``kfac_approx="expand"``).

A layer's weight gets ``G (x) A``: ``A = mean_i a_i a_i^T`` of its inputs and ``G = sum_i B_i^T H_ii B_i`` with the
Jacobian ``B_i`` of the raw outputs with respect to the layer's outputs. The approximation is that of K-FAC: inputs and
output curvature are taken as independent over the points (and, for convolutions, over the positions: K-FAC-expand). It
is exact for one point, or where all points share the inputs or the blocks. Biases and other vectors get their exact
block of what is kept.

Fixes whose output Hessian couples points have cross terms besides, which are left out here;
:mod:`contrastive_curvature.fit.structured` has approximations that keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.layer_parts import MatrixPart
from contrastive_curvature.network.layer_tape import Piece
from contrastive_curvature.network.module import ModulePullback
from contrastive_curvature.network.pullback import KronFactors, own_name
from contrastive_curvature.options import Structure

if TYPE_CHECKING:
    from contrastive_curvature.network.layerwise import LayerwisePullback

BLOCK_ENTRIES = 4096
"""Entries of a parameter outside layers that gets its exact block: 64 MiB in float32, decomposed in seconds."""

FACTOR_SIZE = 16384
"""Rows of the largest factor: 1 GiB in float32, twice that when it is decomposed, which takes an hour."""

_CHUNK_ELEMENTS = 2**23
"""Numbers in a chunk of Jacobians."""


@dataclass(frozen=True)
class LayerRun:
    """One run of a layer on N points.

    Args:
        inputs: What the weight is multiplied with at every position, shape (N, T, F).
        jacobian: Of the raw outputs with respect to what the layer puts out, shape (N, D, T, C).
    """

    inputs: Tensor
    jacobian: Tensor


class ModuleKron:
    """Factors of every parameter of an encoder, from the gradients at its layers.

    A matrix that multiplies the inputs of every position has ``[G, A]``; several runs of it count as more positions.
    A vector has its exact block. Other parameters (tokens and tables that are added, embeddings, grouped convolutions)
    have their exact block up to :data:`BLOCK_ENTRIES` entries, and above that ``[G, A]`` too: their first axis takes
    the place of a layer's outputs, and the other axes that of positions whose inputs are unit vectors.

    Args:
        pullback: The layerwise pullback of the encoder.
    """

    def __init__(self, pullback: LayerwisePullback) -> None:
        self.pullback = pullback
        self.params: list[nn.Parameter] = pullback.trainable
        owners: dict[int, nn.Module] = {}
        for module in pullback.encoder.modules():
            for p in module.parameters(recurse=False):
                owners.setdefault(id(p), module)
        self.owners = [owners[id(p)] for p in self.params]

    def kinds(self) -> list[str]:
        """Return what the factors of every parameter are; those of batches add up where it stays the same."""
        layouts, used = self.pullback.layouts, self._used()
        matrices = frozenset() if layouts is None else layouts.matrices - self.pullback.by_func

        def kind(number: int, p: Tensor) -> str:
            if p.ndim > 1 and number in matrices:
                return "matrix"
            if p.ndim > 1 and number not in used:
                return "none"
            return "block" if p.ndim <= 1 or p.numel() <= BLOCK_ENTRIES else "entries"

        return [kind(number, p) for number, p in enumerate(self.params)]

    def factors(self, x: Inputs, blocks: Blocks, n_data: int) -> KronFactors:
        """Return the factors of a batch, whose ``A`` are averaged over ``n_data`` points; those of batches add up.

        Raises:
            UnsupportedError: A factor would have more than :data:`FACTOR_SIZE` rows.
        """
        out = self.pullback.run_layers(x, lambda: self._layer_factors(x, blocks, n_data))
        kinds = self.kinds()
        for number in sorted(self.pullback.by_func):
            p = self.params[number]
            if kinds[number] == "block":
                out[number] = [self.vector_pullback(p).block_term(x, blocks, Structure.FULL)]
            else:
                run = self._run_of_entries(p, x)
                out[number] = [sandwich(run.jacobian, blocks.matmul), _identity(p, len(blocks) / n_data)]
        return out

    def _layer_factors(self, x: Inputs, blocks: Blocks, n_data: int) -> KronFactors:
        """Return factors of all parameters that are seen in layers; those of the others are zero."""
        out: KronFactors | None = None
        for rows, tape in self.pullback.tapes(x):
            kinds = self.kinds()
            factor = blocks[rows].signed_factor()
            if out is None:
                out = [self._zeros(number, kind, tape.z) for number, kind in enumerate(kinds)]
            for piece in tape.pieces:
                if kinds[piece.number] == "matrix":
                    a = _matrix(piece).inputs[:, 0].flatten(0, 1)
                    out[piece.number][1].addmm_(a.mT, a, alpha=1 / (n_data * _matrix(piece).positions))
            for number, p in enumerate(self.params):
                if kinds[number] in ("entries", "none") and number not in self.pullback.by_func:
                    out[number][1] += _identity(p, len(tape.z) / n_data).to(tape.z)
            for group, signs in self.pullback.backward(tape, factor.columns, factor.signs):
                self._add_curvature(out, group, signs, kinds)
        if out is None:
            out = [self._zeros(number, kind, blocks.u) for number, kind in enumerate(self.kinds())]
        return out

    def _add_curvature(
        self, out: KronFactors, group: Iterable[tuple[Piece, Tensor]], signs: Tensor, kinds: list[str]
    ) -> None:
        parts: dict[int, list[tuple[Piece, Tensor]]] = {}
        for piece, b in group:
            if kinds[piece.number] == "matrix":
                flat = b[:, :, 0]
                signed = flat * signs[:, :, None, None]
                out[piece.number][0].addmm_(signed.flatten(0, 2).mT, flat.flatten(0, 2))
            else:
                parts.setdefault(piece.number, []).append((piece, b))
        for number, found in parts.items():
            p = self.params[number]
            rows = p.numel() if kinds[number] == "block" else _rows(p)
            step = max(1, _CHUNK_ELEMENTS // max(1, p.numel() * signs.shape[0]))
            for start in range(0, signs.shape[1], step):
                some = slice(start, start + step)
                jacobian = _dense(found, p.numel(), some).unflatten(2, (rows, -1)).movedim(3, 2).flatten(0, 2)
                weights = signs[:, some].T.unsqueeze(2).expand(-1, -1, p.numel() // max(1, rows)).flatten()
                out[number][0].addmm_((jacobian * weights.unsqueeze(1)).mT, jacobian)

    def coupled_factors(
        self,
        x: Inputs,
        of_weight: Callable[[LayerRun], list[Tensor]],
        of_bias: Callable[[LayerRun], Tensor],
        of_vector: Callable[[nn.Parameter], Tensor],
    ) -> KronFactors:
        """Return factors that see all points of a batch at once.

        Args:
            x: N points.
            of_weight: Returns ``[G, A]`` of a layer.
            of_bias: Returns the block of its bias.
            of_vector: Returns the block of another parameter.
        """
        return self.pullback.run_layers(x, lambda: self._coupled_factors(x, of_weight, of_bias, of_vector))

    def _coupled_factors(
        self,
        x: Inputs,
        of_weight: Callable[[LayerRun], list[Tensor]],
        of_bias: Callable[[LayerRun], Tensor],
        of_vector: Callable[[nn.Parameter], Tensor],
    ) -> KronFactors:
        tape = self.pullback.tape(x, prove=True)
        kinds = self.kinds()
        axes = torch.eye(tape.z.shape[1], dtype=tape.z.dtype, device=tape.z.device)
        places = {piece.number: {id(run) for run in piece.runs} for piece in tape.pieces}
        runs: dict[int, LayerRun] = {}
        for piece, b in tape.by_piece(axes.unsqueeze(1).expand(-1, len(tape.z), -1)):
            if kinds[piece.number] == "matrix":
                runs[piece.number] = LayerRun(_matrix(piece).inputs[:, 0], b[:, :, 0].transpose(0, 1))
        factors: KronFactors = []
        for number, p in enumerate(self.params):
            same = (k for k in runs if self.owners[k] is self.owners[number] and places[k] == places.get(number))
            weight = next(same, None)
            if number in runs:
                factors.append(of_weight(runs[number]))
            elif kinds[number] in ("entries", "none"):
                factors.append(of_weight(self._run_of_entries(p, x)))
            elif weight is not None:
                factors.append([of_bias(runs[weight])])
            elif kinds[number] == "matrix" or number not in self._used():
                # What the encoder never runs has no curvature.
                factors.append(self._zeros(number, kinds[number], tape.z))
            else:
                factors.append([of_vector(p)])
        return factors

    def vector_pullback(self, p: nn.Parameter) -> ModulePullback:
        """Return the pullback to one parameter."""
        name = next(name for name, other in self.pullback.encoder.named_parameters() if other is p)
        return ModulePullback(self.pullback.encoder, only={name})

    def _run_of_entries(self, p: nn.Parameter, x: Inputs) -> LayerRun:
        """Return a parameter as a layer: its first axis in place of the outputs, its others in place of positions."""
        pullback = self.vector_pullback(p)
        z, context = pullback.forward(x)
        jacobian = pullback.jacobians(context, z)
        others = p.numel() // _rows(p)
        eye = torch.eye(others, dtype=z.dtype, device=z.device)
        return LayerRun(eye.expand(len(z), -1, -1), jacobian.unflatten(2, (_rows(p), others)).transpose(2, 3))

    def _zeros(self, number: int, kind: str, like: Tensor) -> list[Tensor]:
        p = self.params[number]
        sizes: tuple[int, ...] = (_rows(p), p.numel() // _rows(p))
        if kind == "block":
            sizes = (p.numel(),)
        elif kind in ("matrix", "none"):
            sizes = (len(p), p.shape[1:].numel())
        if max(sizes) > FACTOR_SIZE:
            name = own_name(self.pullback.names[number])
            refuse_kron(f"the parameter {name!r}, shape {tuple(p.shape)}, has a factor of {max(sizes)} rows. Freeze it")
        return [like.new_zeros(size, size) for size in sizes]

    def _used(self) -> set[int]:
        """Return the numbers of the parameters that some function takes."""
        layouts = self.pullback.layouts
        return {*self.pullback.by_func, *(() if layouts is None else layouts.used)}


def refuse_kron(why: str) -> None:
    """Refuse what has no Kronecker factors.

    Raises:
        UnsupportedError: Always.
    """
    msg = f"structure 'kron': {why}. Use the structure 'diag', or subset_of_weights='last_layer'."
    raise UnsupportedError(msg)


def sandwich(b: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``sum_t b_t^T H b_t`` (C, C), every position t on its own, of a Jacobian (N, D, T, C).

    Args:
        b: The Jacobian.
        product: ``v -> H v`` for ``v`` of shape (N, D, K).
    """
    curved = product(b.flatten(2)).view_as(b)
    return torch.einsum("ndtc,ndte->ce", b, curved)


def _rows(p: Tensor) -> int:
    """Return the length of the first axis that has one."""
    return next((size for size in p.shape if size > 1), 1)


def _identity(p: Tensor, share: float) -> Tensor:
    """Return the second moment of the unit vectors in the place of the inputs of a parameter outside layers."""
    others = p.numel() // _rows(p)
    return torch.eye(others, dtype=p.dtype, device=p.device) * (share / others)


def _matrix(piece: Piece) -> MatrixPart:
    part: Any = piece.part
    return part


def _dense(found: list[tuple[Piece, Tensor]], size: int, rows: slice) -> Tensor:
    """Return Jacobians of one parameter, shape (n, K, size), of some of the points."""
    first = found[0][1]
    out: Tensor | None = None
    for piece, b in found:
        for entries, chunk in piece.part.jacobians(b):
            if out is None:
                out = first.new_zeros(*chunk.shape[:2], size)
            place = entries if piece.part.entries is None else piece.part.entries[entries]
            out[..., place] += chunk
    if out is None:
        return first.new_zeros(len(range(*rows.indices(first.shape[1]))), first.shape[0], size)
    return out[rows]
