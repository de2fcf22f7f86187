"""The pullback to all trainable parameters of any module, layer by layer: no Jacobian of the whole network is formed.

One forward pass notes every function that applies parameters (:mod:`contrastive_curvature.network.recorder`). One
backward pass for every column of the signed factor of the Hessian's blocks gives the gradients at the outputs of those
functions. From these and from the inputs the diagonal follows exactly
(:mod:`contrastive_curvature.network.layer_parts`), whatever connects the layers.

A parameter without a rule (a function changes it before it is applied, its layer runs in another thread or in a script)
goes through ``torch.func`` instead, that parameter alone, with one warning. It is noticed where a function without a
rule takes a parameter, by a comparison with autograd on a few points, once, and by two more backward passes of every
batch (:mod:`contrastive_curvature.network.layer_proof`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any, TypeVar

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.cross import CrossBlocks, tangent_axes
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs, input_length
from contrastive_curvature.network.kron import ModuleKron, refuse_kron
from contrastive_curvature.network.layer_proof import (
    Layouts,
    check_fast_path,
    few_points,
    find_layouts,
    refuse_gradients,
    unproven,
    with_layouts,
)
from contrastive_curvature.network.layer_tape import (
    NotVerifiedError,
    Piece,
    Tape,
    check_alike,
    cross_diagonals,
    make_pieces,
    shared_columns,
)
from contrastive_curvature.network.module import ModulePullback
from contrastive_curvature.network.pullback import KronFactors, own_name
from contrastive_curvature.network.recorder import Recorder
from contrastive_curvature.network.threads import private_copy
from contrastive_curvature.options import Structure

__all__ = ["LayerwisePullback"]

_T = TypeVar("_T")

_CHUNK_ELEMENTS = 2**25
"""Numbers that the inputs of the layers and one or more gradients of a chunk of points may hold: 128 MiB in float32."""

_COLUMN_ELEMENTS = 2**21
"""Numbers that the gradients of several columns may hold together: where one has more, stacking them gains nothing."""

_TILE_POINTS = 2048
"""Of a tile of cross terms, where points are small: the pairs of a tile are held too."""

Columns = Callable[[slice], tuple[Tensor, Tensor]]
"""Cotangents ``v`` (K, n, D) and their signs (K, n) of the points in some rows."""


class LayerwisePullback(ModulePullback):
    """All trainable parameters of any module: ``diag``, ``kron``, cross terms and covariances of the outputs.

    Other structures and products are those of :class:`ModulePullback`.

    Args:
        encoder: The analysed encoder, in evaluation mode.
        only: Names of the parameters to take; ``None`` takes all trainable ones.

    Raises:
        UnsupportedError: Gradients of a parameter are no derivatives.
    """

    def __init__(self, encoder: Encoder, only: set[str] | None = None) -> None:
        super().__init__(encoder, only=only)
        refuse_gradients(encoder)
        self.names = list(self.params)
        self.trainable = [p for name, p in encoder.named_parameters() if name in self.params]
        self._layouts: Layouts | None = None
        self._example: Inputs | None = None
        self._by_func: set[int] = set()
        self.general: ModulePullback | None = None
        self._values_kept = False
        self._kinds: list[str] | None = None
        self._running = _without_backward_hooks(encoder)

    def keep_values(self) -> None:
        """See :meth:`ModulePullback.keep_values`; from then on, everything is computed there."""
        super().keep_values()
        self._values_kept = True

    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        """See :meth:`Pullback.forward`."""
        if self._layouts is None and input_length(x):
            self._example = few_points(x)
        return super().forward(x)

    def block_term(self, context: Any, blocks: Blocks, structure: Structure) -> Tensor:
        """See :meth:`Pullback.block_term`; the diagonal without a Jacobian of the network."""
        if structure is not Structure.DIAG or self._values_kept:
            return super().block_term(context, blocks, structure)

        def columns(rows: slice) -> tuple[Tensor, Tensor]:
            factor = blocks[rows].signed_factor()
            return factor.columns, factor.signs

        out = self.run_layers(context, lambda: self._diagonal(context, columns))
        self.insert_general(out, lambda general: general.block_term(context, blocks, structure))
        return out

    def curvature(self, context: Any, hessian: OutputHessian, structure: Structure) -> Tensor:
        """See :meth:`Pullback.curvature`; in one tile, blocks and cross terms share their backward passes."""
        n = len(hessian)
        diagonal = structure is Structure.DIAG and hessian.coupled and n > 0 and not self._values_kept
        shared = shared_columns(hessian) if diagonal and n <= self.tile_size(structure, hessian.z.shape[1]) else None
        if shared is None:
            return super().curvature(context, hessian, structure)
        columns, weight, rest = shared

        def compute() -> Tensor:
            out = hessian.z.new_zeros(self.n_params)
            pieces = self.split(out)
            tape = self.tape(context)
            for piece, b, _ in self.backward(tape, columns, columns[..., 0]):
                _add(pieces[piece.number], piece, piece.part.weighted(b, piece.part, b, weight))
            for piece, b, signs in self.backward(tape, rest.columns, rest.signs):
                _add(pieces[piece.number], piece, piece.part.diagonal(b, signs))
            return out

        out = self.run_layers(context, compute)
        self.insert_general(out, lambda general: general.curvature(context, hessian, structure))
        return out

    def cross_term(self, rows_context: Any, columns_context: Any, cross: CrossBlocks, structure: Structure) -> Tensor:
        """See :meth:`Pullback.cross_term`; the diagonal without a Jacobian of the network."""
        if structure is not Structure.DIAG or self._values_kept:
            return super().cross_term(rows_context, columns_context, cross, structure)

        def compute() -> Tensor:
            out = cross.u_rows.new_zeros(self.n_params)
            pieces = self.split(out)
            left = self.tape(rows_context)
            right = left if cross.symmetric else self.tape(columns_context)
            if cross.c is None and cross.roots is None:
                # One axis at a time; the gradients of all axes at all layers are never held.
                check_alike(left, right)
                axes = [tangent_axes(cross.u_rows, cross.n_rows).transpose(0, 1)]
                if right is not left:
                    axes.append(tangent_axes(cross.u_columns, cross.n_columns).transpose(0, 1))
                for k in range(axes[0].shape[0]):
                    one = left.by_piece(axes[0][k : k + 1])
                    other = repeat(None) if right is left else right.by_piece(axes[1][k : k + 1])
                    for (piece, a), right_side in zip(one, other, strict=False):
                        other_piece, b = (piece, a) if right_side is None else right_side
                        if other_piece.number != piece.number:
                            raise NotVerifiedError({piece.number, other_piece.number})
                        found = piece.part.weighted(a, other_piece.part, b, -cross.y)
                        _add(pieces[piece.number], piece, found)
                return out
            for piece, found in cross_diagonals(left, right, cross):
                _add(pieces[piece.number], piece, found)
            return out

        if not all(cross.shape):
            return cross.u_rows.new_zeros(self.n_params)
        out = self.run_layers(rows_context, compute)
        self.insert_general(out, lambda general: general.cross_term(rows_context, columns_context, cross, structure))
        return out

    def kron_factors(self, context: Any, blocks: Blocks, n_data: int) -> KronFactors:
        """See :meth:`Pullback.kron_factors`.

        Raises:
            UnsupportedError: A parameter has other factors in this batch than in the batches before, so that their sum
                would have no meaning.
        """
        kron = ModuleKron(self)
        factors = kron.factors(context, blocks, n_data)
        kinds = kron.kinds()
        if self._kinds is not None and kinds != self._kinds:
            changed = [k for k, (old, new) in enumerate(zip(self._kinds, kinds, strict=True)) if old != new]
            name = own_name(self.names[changed[0]])
            refuse_kron(f"a later batch uses the parameter {name!r} in another way than the first")
        self._kinds = kinds
        return factors

    def output_covariance(self, context: Any, variance: Tensor) -> Tensor:
        """See :meth:`Pullback.output_covariance`; without a Jacobian of the network.

        Raises:
            InputError: There is not one variance a trainable parameter.
        """
        if variance.shape != (self.n_params,):
            hint = "Was a parameter frozen, added or replaced since the variances were computed?"
            wanted = f"the {variance.numel()} trainable parameters that have variances"
            raise InputError(expected("model", wanted, f"{self.n_params} of them", hint))
        if self._values_kept:
            return super().output_covariance(context, variance)
        dim = self.encoder.dim
        own = list(variance.split([p.numel() for p in self.trainable]))

        def compute() -> Tensor:
            out = []
            for rows in self._row_chunks(input_length(context), dim):
                tape = self.tape(self.slice_context(context, rows))
                covariance = tape.z.new_zeros(len(tape.z), dim, dim)
                axes = torch.eye(dim, dtype=tape.z.dtype, device=tape.z.device)
                found = tape.gradients(axis.expand(len(tape.z), -1) for axis in axes)
                for piece in tape.pieces:
                    b = piece.gradients(found, len(tape.z), tape.z.dtype)
                    if b is not None:
                        place = slice(None) if piece.part.entries is None else piece.part.entries
                        covariance += piece.part.covariance(b, own[piece.number][place])
                out.append(covariance)
            return torch.cat(out) if out else variance.new_zeros(0, dim, dim)

        covariance = self.run_layers(context, compute)
        if self.general is not None:
            mine = torch.cat([own[k] for k in sorted(self._by_func)])
            with torch.no_grad():
                covariance += self.general.output_covariance(context, mine)
        return covariance

    def tile_size(self, structure: Structure, dim: int) -> int:
        """See :meth:`Pullback.tile_size`; for diagonals as many points as one graph may have."""
        if structure is not Structure.DIAG or self._values_kept or (self._layouts is None and self._example is None):
            return super().tile_size(structure, dim)
        with _gradients():
            layouts = self._verified(self._example)
        if self.general is not None:
            return min(_TILE_POINTS, self.general.tile_size(structure, dim))
        return max(1, min(_TILE_POINTS, 4 * _CHUNK_ELEMENTS // (layouts.inputs + 2 * layouts.gradients)))

    def run_layers(self, context: Any, compute: Callable[[], _T]) -> _T:
        """Compute something from the layers; again, where a batch turns out to use parameters in another way."""
        with _gradients():
            while True:
                if input_length(context):
                    self._verified(context)
                try:
                    with torch.no_grad():
                        return compute()
                except NotVerifiedError as error:
                    self._give_up(error.numbers)

    def tapes(self, context: Any) -> Iterator[tuple[slice, Tape]]:
        """Runs of chunks of points, of bounded memory."""
        for rows in self._row_chunks(input_length(context), 1):
            yield rows, self.tape(self.slice_context(context, rows))

    def backward(self, tape: Tape, columns: Tensor, signs: Tensor) -> Iterator[tuple[Piece, Tensor, Tensor]]:
        """Pieces with the gradients of columns (K, n, D) and with the signs (K, n), several columns at a time."""
        for group, s in self.backward_together(tape, columns, signs):
            for piece, b in group:
                yield piece, b, s

    def backward_together(
        self, tape: Tape, columns: Tensor, signs: Tensor
    ) -> Iterator[tuple[Iterator[tuple[Piece, Tensor]], Tensor]]:
        """The gradients of all pieces, several columns at a time."""
        n = len(tape.z)
        size = 1 if self._layouts is None else self._layouts.gradients
        step = max(1, _COLUMN_ELEMENTS // max(1, n * size))
        for v, s in zip(columns.split(step), signs.split(step), strict=True):
            yield tape.by_piece(v), s

    def tape(self, context: Any) -> Tape:
        """One run of the encoder.

        Raises:
            NotVerifiedError: It uses parameters in another way than the batch that was compared with autograd.
            UnsupportedError: The encoder puts out something else where no gradients are asked for.
        """
        layouts = self._verified(context)
        x = _plain(context)
        with torch.enable_grad(), Recorder(list(self.trainable), layouts.lookups) as recorder:
            z = self._running(x)
        check_fast_path(self._running, x, z)
        if recorder.unknown - self._by_func:
            raise NotVerifiedError(recorder.unknown - self._by_func)
        uses = with_layouts(recorder.uses, layouts.places, len(z), frozenset(self._by_func))
        pieces, failed = make_pieces(uses, len(z), z.dtype)
        if failed:
            raise NotVerifiedError(failed)
        tape = Tape(z, pieces)
        wrong = unproven(tape, self.trainable, self._by_func)
        if wrong:
            raise NotVerifiedError(wrong)
        return tape

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """Views of a vector (P,), one a parameter."""
        return flat.split([p.numel() for p in self.trainable])

    def insert_general(self, flat: Tensor, compute: Callable[[ModulePullback], Tensor]) -> None:
        """Put what ``torch.func`` computes in the places of its parameters."""
        if self.general is None:
            return
        with torch.no_grad():
            found = compute(self.general)
        start, taken = 0, 0
        for number, p in enumerate(self.trainable):
            if number in self._by_func:
                flat[start : start + p.numel()] = found[taken : taken + p.numel()]
                taken += p.numel()
            start += p.numel()

    @property
    def by_func(self) -> frozenset[int]:
        """Numbers of the parameters that go through ``torch.func``."""
        return frozenset(self._by_func)

    @property
    def layouts(self) -> Layouts | None:
        """What the comparison with autograd told, once there was one."""
        return self._layouts

    def _diagonal(self, context: Any, columns: Columns) -> Tensor:
        out: Tensor | None = None
        for rows, tape in self.tapes(context):
            v, signs = columns(rows)
            if out is None:
                out = v.new_zeros(self.n_params)
                pieces = self.split(out)
            for piece, b, s in self.backward(tape, v, signs):
                _add(pieces[piece.number], piece, piece.part.diagonal(b, s))
        return columns(slice(0, 0))[0].new_zeros(self.n_params) if out is None else out

    def _row_chunks(self, n: int, columns: int) -> Iterator[slice]:
        size = 1 if self._layouts is None else self._layouts.inputs + (1 + columns) * self._layouts.gradients
        step = max(1, _CHUNK_ELEMENTS * (1 if columns == 1 else 2) // max(1, size))
        for start in range(0, n, step):
            yield slice(start, min(start + step, n))

    def _verified(self, context: Any) -> Layouts:
        """Once, with the first batch: compare with autograd."""
        if self._layouts is None:
            self._layouts = find_layouts(self._running, self.trainable, _plain(few_points(context)))
            if self._layouts.lacking:
                self._give_up(set(self._layouts.lacking))
        return self._layouts

    def _give_up(self, numbers: set[int]) -> None:
        """Take parameters through ``torch.func`` from now on."""
        new = numbers - self._by_func
        self._by_func |= numbers
        names = {self.names[k] for k in self._by_func}
        self.general = ModulePullback(self.encoder, only=names)
        layers = list(dict.fromkeys(own_name(self.names[k]) for k in sorted(new)))
        shown = ", ".join(repr(name) for name in layers[:5]) + (", ..." if len(layers) > 5 else "")
        msg = (
            f"model: the Jacobians of {len(layers)} parameters ({shown}) are taken point by point, which is exact and "
            "slow: they are applied in a way that the layer-by-layer computation does not know."
        )
        warnings.warn(msg, UserWarning, stacklevel=2)


def _add(target: Tensor, piece: Piece, found: Tensor) -> None:
    if piece.part.entries is None:
        target += found
    else:
        target.index_add_(0, piece.part.entries, found)


def _without_backward_hooks(encoder: Encoder) -> Encoder:
    """The encoder, or a copy where hooks would compute for the user in every backward pass (BackPACK's do)."""
    if not any(module._backward_hooks or module._backward_pre_hooks for module in encoder.modules()):
        return encoder
    try:
        return private_copy(encoder, backward_hooks=False)
    except Exception:
        return encoder


@contextmanager
def _gradients() -> Iterator[None]:
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _plain(x: Any) -> Any:
    """A batch that autograd can work with."""
    if isinstance(x, Tensor):
        return x.clone() if x.is_inference() else x
    return {k: _plain(v) if isinstance(v, Tensor) else v for k, v in x.items()}
