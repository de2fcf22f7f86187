"""The pullback to all trainable parameters of any module, layer by layer: no Jacobian of the whole network is formed.

One forward pass notes every function that applies parameters (:mod:`contrastive_curvature.network.recorder`). One
backward pass for every column of the signed factor of the Hessian's blocks gives the gradients at the outputs of those
functions. From these and from the inputs the diagonal follows exactly
(:mod:`contrastive_curvature.network.layer_parts`), whatever connects the layers.

A parameter without a rule (a function changes it before it is applied, its layer runs in another thread or in a script)
goes through ``torch.func`` instead, that parameter alone, with one warning. It is noticed where a function without a
rule takes a parameter, in every batch, and by a comparison with autograd
(:mod:`contrastive_curvature.network.layer_proof`): of a few points, of the first batches, and of a tenth of the
later ones or more, at random. Where every output has a backward pass of its own, which costs much more than the
comparison, every batch is compared.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from contrastive_curvature.errors import InputError, UnsupportedError, expected
from contrastive_curvature.hessian.blocks import Blocks, SignedFactor
from contrastive_curvature.hessian.cross import CrossBlocks, tangent_axes
from contrastive_curvature.hessian.node_blocks import NodeBlocks
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs, few_points, input_length
from contrastive_curvature.network.kron import ModuleKron, refuse_kron
from contrastive_curvature.network.layer_proof import (
    Layouts,
    check_fast_path,
    find_layouts,
    refuse_gradients,
    unproven,
)
from contrastive_curvature.network.layer_tape import Gradients, NotVerifiedError, Piece, Tape, make_pieces
from contrastive_curvature.network.module import ModulePullback
from contrastive_curvature.network.pullback import KronFactors, own_name
from contrastive_curvature.network.recorder import Recorder
from contrastive_curvature.network.threads import private_copy
from contrastive_curvature.options import Structure

_T = TypeVar("_T")

_CHUNK_ELEMENTS = 2**25
"""Numbers that the inputs of the layers and one or more gradients of a chunk of points may hold: 128 MiB in float32."""

_COLUMN_ELEMENTS = 2**21
"""Numbers that the gradients of several columns may hold together: where one has more, stacking them gains nothing."""

_HELD_ELEMENTS = 2**27
"""Numbers that the gradients of all outputs at some layers may hold: 512 MiB in float32; fewer need more passes."""

_PROOFS = 4
"""The first runs that are compared with autograd, and of every later run k this share 4 / k, but at least a tenth."""

_TILE_POINTS = 2048
"""Of a tile of cross terms, where points are small: the pairs of a tile are held too."""

_disproven: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Parameters of encoders that a later batch of a fit used in another way than the first, for the next fit."""


class LayerwisePullback(ModulePullback):
    """All trainable parameters of any module: ``diag``, ``kron``, cross terms and covariances of the outputs.

    Other structures and products are those of :class:`ModulePullback`.

    Args:
        encoder: The analysed encoder, in evaluation mode.
        only: Names of the parameters to take; ``None`` takes all trainable ones.

    Attributes:
        by_func: Numbers of the parameters that go through ``torch.func``.
        layouts: What a few points told about the layers; ``None`` before the first batch.

    Raises:
        UnsupportedError: Gradients of a parameter are no derivatives.
    """

    def __init__(self, encoder: Encoder, only: set[str] | None = None) -> None:
        super().__init__(encoder, only=only)
        refuse_gradients(encoder)
        self.names = list(self.params)
        self.trainable = [p for name, p in encoder.named_parameters() if name in self.params]
        self.layouts: Layouts | None = None
        self._example: Inputs | None = None
        self.by_func: set[int] = set()
        self.general: ModulePullback | None = None
        self._kinds: list[str] | None = None
        self._running = _without_backward_hooks(encoder)
        self._random = random.Random(0)
        self._runs, self._trusted = 0, False

    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        """See :meth:`Pullback.forward`."""
        if self.layouts is None and input_length(x):
            self._example = few_points(x)
        return super().forward(x)

    def block_term(self, context: Any, blocks: Blocks, structure: Structure) -> Tensor:
        """See :meth:`Pullback.block_term`; the diagonal without a Jacobian of the network."""
        if structure is not Structure.DIAG:
            return super().block_term(context, blocks, structure)

        def compute() -> Tensor:
            out: Tensor | None = None
            for rows, tape in self.tapes(context):
                factor = blocks[rows].signed_factor()
                if out is None:
                    out = factor.columns.new_zeros(self.n_params)
                self._add_squares(out, tape, factor.columns, factor.signs)
            return blocks.u.new_zeros(self.n_params) if out is None else out

        out = self.run_layers(context, compute)
        self._insert_general(out, lambda general: general.block_term(context, blocks, structure))
        return out

    def curvature(self, context: Any, hessian: OutputHessian, structure: Structure) -> Tensor:
        """See :meth:`Pullback.curvature`; in one tile, blocks and cross terms share their backward passes."""
        n = len(hessian)
        diagonal = structure is Structure.DIAG and hessian.coupled and n > 0
        shared = _shared_columns(hessian) if diagonal and n <= self.tile_size(structure, hessian.z.shape[1]) else None
        if shared is None:
            return super().curvature(context, hessian, structure)
        columns, weight, rest = shared

        def compute() -> Tensor:
            out = hessian.z.new_zeros(self.n_params)
            pieces = self.split(out)
            tape = self.tape(context, prove=True)
            for group, _ in self.backward(tape, columns, columns[..., 0]):
                for piece, b in group:
                    _add(pieces[piece.number], piece, piece.part.weighted(b, piece.part, b, weight))
            self._add_squares(out, tape, rest.columns, rest.signs)
            return out

        out = self.run_layers(context, compute)
        self._insert_general(out, lambda general: general.curvature(context, hessian, structure))
        return out

    def cross_term(self, rows_context: Any, columns_context: Any, cross: CrossBlocks, structure: Structure) -> Tensor:
        """See :meth:`Pullback.cross_term`; the diagonal without a Jacobian of the network."""
        if structure is not Structure.DIAG:
            return super().cross_term(rows_context, columns_context, cross, structure)
        if not all(cross.shape):
            return cross.u_rows.new_zeros(self.n_params)

        def compute() -> Tensor:
            out = cross.u_rows.new_zeros(self.n_params)
            pieces = self.split(out)
            left = self.tape(rows_context, prove=True)
            right = left if cross.symmetric else self.tape(columns_context, prove=True)
            for piece, found in _cross_diagonals(left, right, cross):
                _add(pieces[piece.number], piece, found)
            return out

        out = self.run_layers(rows_context, compute)
        self._insert_general(out, lambda general: general.cross_term(rows_context, columns_context, cross, structure))
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
        dim = self.encoder.dim
        own = self.split(variance)

        def compute() -> Tensor:
            out = []
            for _, tape in self.tapes(context, columns=dim, prove=True):
                covariance = tape.z.new_zeros(len(tape.z), dim, dim)
                found = _axes(tape)
                for piece in tape.pieces:
                    b = piece.gradients(found, len(tape.z), tape.z.dtype)
                    if b is not None:
                        place = slice(None) if piece.part.entries is None else piece.part.entries
                        covariance += piece.part.covariance(b, own[piece.number][place])
                out.append(covariance)
            return torch.cat(out) if out else variance.new_zeros(0, dim, dim)

        covariance = self.run_layers(context, compute)
        if self.general is not None:
            mine = torch.cat([own[k] for k in sorted(self.by_func)])
            with torch.no_grad():
                covariance += self.general.output_covariance(context, mine)
        return covariance

    def tile_size(self, structure: Structure, dim: int) -> int:
        """See :meth:`Pullback.tile_size`; for diagonals as many points as one graph may have."""
        if structure is not Structure.DIAG or (self.layouts is None and self._example is None):
            return super().tile_size(structure, dim)
        with _gradients():
            layouts = self._layouts_of(self._example)
        if self.general is not None:
            return min(_TILE_POINTS, self.general.tile_size(structure, dim))
        return max(1, min(_TILE_POINTS, 4 * _CHUNK_ELEMENTS // (layouts.inputs + 2 * layouts.gradients)))

    def run_layers(self, context: Any, compute: Callable[[], _T]) -> _T:
        """Compute something from the layers; again, where a batch turns out to use parameters in another way."""
        with _gradients():
            while True:
                if input_length(context):
                    self._layouts_of(context)
                try:
                    with torch.no_grad():
                        return compute()
                except NotVerifiedError as error:
                    self._give_up(error.numbers)

    def tapes(self, context: Any, columns: int = 1, prove: bool = False) -> Iterator[tuple[slice, Tape]]:
        """Yield runs of chunks of points, of bounded memory, for gradients of some columns at once."""
        n = input_length(context)
        size = 1 if self.layouts is None else self.layouts.inputs + (1 + columns) * self.layouts.gradients
        step = max(1, _CHUNK_ELEMENTS * (1 if columns == 1 else 2) // max(1, size))
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            yield rows, self.tape(self.slice_context(context, rows), prove)

    def backward(
        self, tape: Tape, columns: Tensor, signs: Tensor
    ) -> Iterator[tuple[Iterator[tuple[Piece, Tensor]], Tensor]]:
        """Yield the gradients of all pieces for columns (K, n, D) and the signs (K, n), several columns at a time."""
        size = 1 if self.layouts is None else self.layouts.gradients
        step = max(1, _COLUMN_ELEMENTS // max(1, len(tape.z) * size))
        for v, s in zip(columns.split(step), signs.split(step), strict=True):
            yield tape.by_piece(v), s

    def tape(self, context: Any, prove: bool = False) -> Tape:
        """Run the encoder once, and compare with autograd where that is asked for or due.

        Raises:
            NotVerifiedError: It uses parameters in another way than the batch before, or disagrees with autograd.
            UnsupportedError: The encoder puts out something else where no gradients are asked for; or batches that were
                not compared with autograd may be wrong.
        """
        tape = self._record(context)
        self._runs += 1
        if not prove and self._random.random() >= max(_PROOFS / self._runs, 0.1):
            self._trusted = True
            return tape
        wrong = unproven(tape, self.trainable, self.by_func)
        if not wrong:
            return tape
        if self._trusted:
            self._refuse_sum(wrong)
        raise NotVerifiedError(wrong)

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """Return views of a vector (P,), one a parameter."""
        return flat.split([p.numel() for p in self.trainable])

    def _record(self, context: Any) -> Tape:
        layouts = self._layouts_of(context)
        x = _plain(context)
        with torch.enable_grad(), Recorder(list(self.trainable), layouts.lookups) as recorder:
            z = self._running(x)
        check_fast_path(self._running, x, z)
        if recorder.unknown - self.by_func:
            raise NotVerifiedError(recorder.unknown - self.by_func)
        return Tape(z, make_pieces(recorder.uses, layouts.places, z, self.by_func))

    def _refuse_sum(self, numbers: set[int]) -> None:
        """Refuse sums over batches that may be wrong, and remember the parameters for the next fit.

        Raises:
            UnsupportedError: Always.
        """
        names = {self.names[k] for k in numbers}
        _disproven.setdefault(self.encoder.model, set()).update(names)
        msg = (
            f"model: a later batch uses {_listed(names)} in another way than the first, as an encoder does that sorts "
            "points or branches on their values, and the sums over the batches before may be wrong. Fit once more: the "
            "Jacobians of these parameters are then taken point by point, which is exact and slow."
        )
        raise UnsupportedError(msg)

    def _add_squares(self, out: Tensor, tape: Tape, columns: Tensor, signs: Tensor) -> None:
        """Add ``sum_ki sign_ki (J_i^T v_ki)^2`` of columns (K, n, D)."""
        pieces = self.split(out)
        for group, s in self.backward(tape, columns, signs):
            for piece, b in group:
                _add(pieces[piece.number], piece, piece.part.diagonal(b, s))

    def _insert_general(self, flat: Tensor, compute: Callable[[ModulePullback], Tensor]) -> None:
        """Put what ``torch.func`` computes in the places of its parameters."""
        if self.general is None:
            return
        with torch.no_grad():
            found = compute(self.general)
        pieces, mine = self.split(flat), sorted(self.by_func)
        for number, values in zip(mine, found.split([self.trainable[k].numel() for k in mine]), strict=True):
            pieces[number].copy_(values)

    def _layouts_of(self, context: Any) -> Layouts:
        """Analyse the layers with a few points of the first batch."""
        if self.layouts is None:
            few = _plain(few_points(context))
            self.layouts = find_layouts(self._running, self.trainable, few)
            known = _disproven.get(self.encoder.model, set())
            self.by_func = {*self.layouts.lacking, *(k for k, name in enumerate(self.names) if name in known)}
            try:
                wrong = unproven(self._record(few), self.trainable, self.by_func)
            except NotVerifiedError as error:
                wrong = error.numbers
            lacking, self.by_func = self.by_func | wrong, set()
            if lacking:
                self._give_up(lacking)
        return self.layouts

    def _give_up(self, numbers: set[int]) -> None:
        """Take parameters through ``torch.func`` from now on."""
        new = numbers - self.by_func
        self.by_func |= numbers
        self._runs = 0
        self.general = ModulePullback(self.encoder, only={self.names[k] for k in self.by_func})
        msg = (
            f"model: the Jacobians of {_listed([self.names[k] for k in sorted(new)])} are taken point by point, which "
            "is exact and slow: they are applied in a way that the layer-by-layer computation does not know."
        )
        warnings.warn(msg, UserWarning, stacklevel=2)


def _listed(names: Iterable[str]) -> str:
    own = list(dict.fromkeys(own_name(name) for name in names))
    shown = ", ".join(repr(name) for name in own[:5]) + (", ..." if len(own) > 5 else "")
    return f"{len(own)} parameters ({shown})"


def _add(target: Tensor, piece: Piece, found: Tensor) -> None:
    if piece.part.entries is None:
        target += found
    else:
        target.index_add_(0, piece.part.entries, found)


def _without_backward_hooks(encoder: Encoder) -> Encoder:
    """Return the encoder, or a copy where hooks would compute for the user in every backward pass (BackPACK's do)."""
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
    """Return a batch that autograd can work with."""
    if isinstance(x, Tensor):
        return x.clone() if x.is_inference() else x
    return {k: _plain(v) if isinstance(v, Tensor) else v for k, v in x.items()}


def _shared_columns(hessian: OutputHessian) -> tuple[Tensor, Tensor, SignedFactor] | None:
    """Split a coupled Hessian of N points into columns that all points share, and columns of each point.

    ``H_ij = sum_k w_ij a_ki a_kj^T + [i = j] sum_c sign_ci v_ci v_ci^T`` with the tangent axes
    ``a_ki = P_i e_k / n_i``: the multiple of the projector in the diagonal blocks is one more weight of these axes, so
    that two columns stay for the rest of the blocks.

    Returns:
        The columns ``a`` (D, N, D), the weights ``w`` (N, N) and the other columns; ``None`` for another Hessian.
    """
    blocks = hessian.blocks
    everything = slice(0, len(hessian))
    cross = hessian.cross(everything, everything)
    if not isinstance(blocks, NodeBlocks) or cross.c is not None or cross.roots is not None:
        return None
    weight = -cross.y
    weight.diagonal().add_(blocks.c * hessian.n.square())
    plane = torch.stack([blocks.r, blocks.q, blocks.q, blocks.p], dim=1).view(-1, 2, 2)
    values, turn = torch.linalg.eigh(plane)
    vectors = torch.stack([blocks.u, blocks.t], dim=2) @ (turn * values.abs().sqrt().unsqueeze(1))
    rest = SignedFactor(vectors.permute(2, 0, 1), values.sign().T)
    return tangent_axes(hessian.u, hessian.n).transpose(0, 1), weight, rest


def _cross_diagonals(left: Tape, right: Tape, cross: CrossBlocks) -> Iterator[tuple[Piece, Tensor]]:
    """Yield diagonals of ``sum_ij J_i^T H_ij J_j`` in parts, of points i and j; both sides may be the same object.

    Raises:
        NotVerifiedError: The two sides use the parameters in different ways.
    """
    numbers = [[piece.number for piece in tape.pieces] for tape in (left, right)]
    if numbers[0] != numbers[1]:
        raise NotVerifiedError({*numbers[0], *numbers[1]})
    if cross.c is None and cross.roots is None:
        # One axis at a time; the gradients of all axes at all layers are never held.
        sides = [(left, tangent_axes(cross.u_rows, cross.n_rows).transpose(0, 1))]
        if right is not left:
            sides.append((right, tangent_axes(cross.u_columns, cross.n_columns).transpose(0, 1)))
        for k in range(left.z.shape[1]):
            for pair in zip(*(tape.by_piece(axes[k : k + 1]) for tape, axes in sides), strict=False):
                (piece, a), (other, b) = pair[0], pair[-1]
                if other.number != piece.number:
                    raise NotVerifiedError({piece.number, other.number})
                yield piece, piece.part.weighted(a, other.part, b, -cross.y)
        return
    pairs = list(zip(left.pieces, right.pieces, strict=True))
    points = len(left.z) + (0 if right is left else len(right.z))
    for group in _groups(pairs, left.z.shape[1] * points // max(1, len(left.z))):
        of_left = _axes(left, [a for a, _ in group])
        of_right = of_left if right is left else _axes(right, [b for _, b in group])
        for one, other in group:
            rows = one.gradients(of_left, len(left.z), left.z.dtype)
            columns = rows if right is left else other.gradients(of_right, len(right.z), right.z.dtype)
            if rows is not None and columns is not None:
                yield one, one.part.cross(rows, other.part, columns, cross)


def _axes(tape: Tape, pieces: Sequence[Piece] | None = None) -> Gradients:
    """Return the gradients of every output at the runs of some pieces, or of all."""
    axes = torch.eye(tape.z.shape[1], dtype=tape.z.dtype, device=tape.z.device)
    return tape.gradients((axis.expand(len(tape.z), -1) for axis in axes), pieces)


def _groups(pairs: list[tuple[Piece, Piece]], copies: int) -> Iterator[list[tuple[Piece, Piece]]]:
    """Yield pieces whose gradients fit into memory together, from the last layers, whose passes are short, on."""
    group: list[tuple[Piece, Piece]] = []
    runs: set[int] = set()
    held = 0
    for pair in reversed(pairs):
        new = {id(run): run for run in pair[0].runs if id(run) not in runs}
        size = copies * sum(run.shape.numel() for run in new.values())
        if group and held + size > _HELD_ELEMENTS:
            yield group
            group, runs, held = [], set(), 0
            size = copies * sum(run.shape.numel() for run in pair[0].runs)
        group.append(pair)
        runs.update(id(run) for run in pair[0].runs)
        held += size
    if group:
        yield group
