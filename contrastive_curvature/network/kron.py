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
from typing import TYPE_CHECKING

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

__all__ = [
    "BLOCK_ENTRIES",
    "FACTOR_SIZE",
    "LayerRun",
    "ModuleKron",
    "refuse_kron",
    "sandwich",
    "zero_factors",
]


BLOCK_ENTRIES = 4096
"""Entries of a parameter outside layers that gets its exact block: 64 MiB in float32, decomposed in seconds."""

FACTOR_SIZE = 16384
"""Rows of the largest factor: 1 GiB in float32, twice that when it is decomposed, which takes an hour."""

_CHUNK_ELEMENTS = 2**23
"""Numbers in a chunk of Jacobians."""

Columns = Callable[[slice], tuple[Tensor, Tensor]]
"""Cotangents ``v`` (K, n, D) and their signs (K, n) of the points in some rows."""


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

    Raises:
        UnsupportedError: A factor would have more than :data:`FACTOR_SIZE` rows.
    """

    def __init__(self, pullback: LayerwisePullback) -> None:
        self.encoder, self.pullback = pullback.encoder, pullback
        self.params: list[nn.Parameter] = self.pullback.trainable
        owners: dict[int, tuple[nn.Module, str]] = {}
        for module in self.encoder.modules():
            for name, p in module.named_parameters(recurse=False):
                owners.setdefault(id(p), (module, name))
        self.owners = [owners[id(p)] for p in self.params]
        self._shared: set[int] = set()
        self.layers = list(
            {id(m): m for (m, _), p in zip(self.owners, self.params, strict=True) if p.ndim > 1}.values()
        )

    def factors(self, x: Inputs, blocks: Blocks, n_data: int) -> KronFactors:
        """Factors of a batch.

        Args:
            x: N points.
            blocks: Their Hessian blocks.
            n_data: Number of points over which the ``A`` are averaged.

        Returns:
            The factors; those of batches add up.
        """

        def columns(rows: slice) -> tuple[Tensor, Tensor]:
            factor = blocks[rows].signed_factor()
            return factor.columns, factor.signs

        out = self.signed_factors(x, columns, n_data)
        for number in sorted(self.pullback.by_func):
            p = self.params[number]
            if self._is_block(number):
                general = self.vector_pullback(p)
                out[number] = [general.block_term(x, blocks, Structure.FULL)]
            else:
                run = self._run_of_entries(number, x)
                out[number] = [sandwich(run.jacobian, blocks.matmul), _identity(p, len(blocks) / n_data)]
        return out

    def kinds(self) -> list[str]:
        """What the factors of every parameter are; those of batches add up where it stays the same."""
        matrices = self._matrices
        return [
            "block" if self._is_block(k) else "matrix" if k in matrices else "entries" if k in self._used else "none"
            for k in range(len(self.params))
        ]

    def signed_factors(self, x: Inputs, columns: Callable[[slice], tuple[Tensor, Tensor]], n_data: int) -> KronFactors:
        """Factors of all parameters that are seen in layers, those of the others are zero.

        Args:
            x: N points.
            columns: Of the points in some rows: cotangents ``v`` (K, n, D) and their signs (K, n), such that the sum
                over k of ``sign_ki v_ki v_ki^T`` is the block of point i.
            n_data: Number of points over which the ``A`` are averaged.

        Returns:
            The factors.
        """

        def compute() -> KronFactors:
            out: KronFactors | None = None
            for rows, tape in self.pullback.tapes(x):
                v, signs = columns(rows)
                if out is None:
                    out = [self._zeros(k, tape.z) for k in range(len(self.params))]
                for piece in tape.pieces:
                    if piece.number in self._matrices:
                        a = _inputs(piece)
                        out[piece.number][1].addmm_(a.mT, a, alpha=1 / (n_data * _positions(piece)))
                for k, p in enumerate(self.params):
                    if not self._is_block(k) and k not in self._matrices and k not in self.pullback.by_func:
                        out[k][1] += _identity(p, len(tape.z) / n_data).to(tape.z)
                for group, s in self.pullback.backward(tape, v, signs):
                    self._add_curvature(out, group, s)
            return [self._zeros(k, p) for k, p in enumerate(self.params)] if out is None else out

        return self.pullback.run_layers(x, compute)

    def _add_curvature(self, out: KronFactors, group: Iterable[tuple[Piece, Tensor]], signs: Tensor) -> None:
        parts: dict[int, list[tuple[Piece, Tensor]]] = {}
        for piece, b in group:
            if piece.number in self._matrices:
                flat = b[:, :, 0]
                signed = flat * signs[:, :, None, None]
                out[piece.number][0].addmm_(signed.flatten(0, 2).mT, flat.flatten(0, 2))
            else:
                parts.setdefault(piece.number, []).append((piece, b))
        for number, found in parts.items():
            p = self.params[number]
            rows = p.numel() if self._is_block(number) else _rows(p)
            step = max(1, _CHUNK_ELEMENTS // max(1, p.numel() * signs.shape[0]))
            for start in range(0, signs.shape[1], step):
                some = slice(start, start + step)
                jacobian = _dense(found, p.numel(), some).unflatten(2, (rows, -1)).movedim(3, 2).flatten(0, 2)
                weights = signs[:, some].T.unsqueeze(2).expand(-1, -1, p.numel() // max(1, rows)).flatten()
                out[number][0].addmm_((jacobian * weights.unsqueeze(1)).mT, jacobian)

    def run(self, x: Inputs) -> dict[int, LayerRun]:
        """Run the encoder once and differentiate its outputs.

        Args:
            x: N points.

        Returns:
            By the ``id`` of every layer with a matrix; layers that never run are left out. By the ``id`` of the
            parameter for other parameters of more than :data:`BLOCK_ENTRIES` entries.
        """
        return self.pullback.run_layers(x, lambda: self._runs(x))

    def _runs(self, x: Inputs) -> dict[int, LayerRun]:
        tape = self.pullback.tape(x, prove=True)
        axes = torch.eye(tape.z.shape[1], dtype=tape.z.dtype, device=tape.z.device)
        self._shared.clear()
        places = {piece.number: {id(run) for run in piece.runs} for piece in tape.pieces}
        runs: dict[int, LayerRun] = {}
        for piece, b in tape.by_piece(axes.unsqueeze(1).expand(-1, len(tape.z), -1)):
            if piece.number in self._matrices:
                module, _ = self.owners[piece.number]
                runs[id(module)] = LayerRun(_inputs(piece, flat=False), b[:, :, 0].transpose(0, 1))
        for number, (module, _) in enumerate(self.owners):
            weight = next((k for k in self._matrices if self.owners[k][0] is module), None)
            if weight is not None and number in places and places[number] == places.get(weight):
                self._shared.add(number)
            if number not in self._matrices and not self._is_block(number):
                runs[id(self.params[number])] = self._run_of_entries(number, x)
        return runs

    def assemble(
        self,
        runs: dict[int, LayerRun],
        of_weight: Callable[[LayerRun], list[Tensor]],
        of_bias: Callable[[LayerRun], Tensor],
        of_vector: Callable[[nn.Parameter], Tensor],
    ) -> KronFactors:
        """Factors in the order of the parameters.

        Args:
            runs: From :meth:`run`.
            of_weight: ``[G, A]`` of a layer.
            of_bias: Block of its bias.
            of_vector: Block of another parameter.

        Returns:
            The factors.
        """
        factors: KronFactors = []
        for number, ((module, _), p) in enumerate(zip(self.owners, self.params, strict=True)):
            run = runs.get(id(p)) if number not in self._matrices else runs.get(id(module))
            if run is not None:
                factors.append(of_weight(run))
            elif number in self._shared and id(module) in runs:
                factors.append([of_bias(runs[id(module)])])
            elif number in self._matrices or number not in self._used:
                # What the encoder never runs has no curvature.
                factors.append(zero_factors(p))
            else:
                factors.append([of_vector(p)])
        return factors

    def vector_pullback(self, p: nn.Parameter) -> ModulePullback:
        """The pullback to one parameter."""
        name = next(name for name, other in self.encoder.named_parameters() if other is p)
        return ModulePullback(self.encoder, only={name})

    def _run_of_entries(self, number: int, x: Inputs) -> LayerRun:
        """A parameter as a layer: its first axis in place of the outputs, its others in place of positions."""
        p = self.params[number]
        z, context = self.vector_pullback(p).forward(x)
        jacobian = self.vector_pullback(p).jacobians(context, z)
        others = p.numel() // _rows(p)
        eye = torch.eye(others, dtype=z.dtype, device=z.device)
        return LayerRun(eye.expand(len(z), -1, -1), jacobian.unflatten(2, (_rows(p), others)).transpose(2, 3))

    def _zeros(self, number: int, like: Tensor) -> list[Tensor]:
        p = self.params[number]
        if self._is_block(number):
            sizes: tuple[int, ...] = (p.numel(),)
        elif number in self._matrices or number not in self._used:
            sizes = (len(p), p.shape[1:].numel())
        else:
            sizes = (_rows(p), p.numel() // _rows(p))
        if max(sizes) > FACTOR_SIZE:
            name = own_name(self.pullback.names[number])
            refuse_kron(f"the parameter {name!r}, shape {tuple(p.shape)}, has a factor of {max(sizes)} rows. Freeze it")
        return [like.new_zeros(size, size) for size in sizes]

    @property
    def _matrices(self) -> frozenset[int]:
        layouts = self.pullback.layouts
        return frozenset() if layouts is None else layouts.matrices - self.pullback.by_func

    @property
    def _used(self) -> frozenset[int]:
        layouts = self.pullback.layouts
        return frozenset() if layouts is None else layouts.used | self.pullback.by_func

    def _is_block(self, number: int) -> bool:
        p = self.params[number]
        other = number in self._used and number not in self._matrices
        return p.ndim <= 1 or (other and p.numel() <= BLOCK_ENTRIES)


def refuse_kron(why: str) -> None:
    """Refuse what has no Kronecker factors.

    Raises:
        UnsupportedError: Always.
    """
    msg = f"structure 'kron': {why}. Use the structure 'diag', or subset_of_weights='last_layer'."
    raise UnsupportedError(msg)


def zero_factors(p: Tensor) -> list[Tensor]:
    """What a parameter without curvature has: ``[G, A]`` of a matrix, ``[block]`` of a vector."""
    sizes = (p.numel(),) if p.ndim <= 1 else (len(p), p.shape[1:].numel())
    return [p.new_zeros(size, size) for size in sizes]


def sandwich(b: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """``sum_t b_t^T H b_t`` (C, C), every position t on its own.

    Args:
        b: Jacobian, shape (N, D, T, C).
        product: ``v -> H v`` for ``v`` of shape (N, D, K).

    Returns:
        The curvature of what the layer puts out.
    """
    curved = product(b.flatten(2)).view_as(b)
    return torch.einsum("ndtc,ndte->ce", b, curved)


def _rows(p: Tensor) -> int:
    """Length of the first axis that has one."""
    return next((size for size in p.shape if size > 1), 1)


def _identity(p: Tensor, share: float) -> Tensor:
    """Second moment of the unit vectors that stand for the inputs of a parameter outside layers."""
    others = p.numel() // _rows(p)
    return torch.eye(others, dtype=p.dtype, device=p.device) * (share / others)


def _matrix(piece: Piece) -> MatrixPart:
    if not isinstance(piece.part, MatrixPart):
        msg = "this parameter is no matrix"
        raise TypeError(msg)
    return piece.part


def _inputs(piece: Piece, flat: bool = True) -> Tensor:
    """Inputs of a matrix, shape (n, positions, F) or (n * positions, F)."""
    inputs = _matrix(piece).inputs[:, 0]
    return inputs.flatten(0, 1) if flat else inputs


def _positions(piece: Piece) -> int:
    return _matrix(piece).positions


def _dense(found: list[tuple[Piece, Tensor]], size: int, rows: slice) -> Tensor:
    """Jacobians of one parameter, shape (n, K, size), of some of the points."""
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
