"""The pullback to all trainable parameters of any module, layer by layer, without a Jacobian of the whole network.

One forward pass notes every function that applies parameters (:mod:`contrastive_curvature.network.recorder`). The
Hessian's blocks have a signed factor; one backward pass for each column of the factor yields the gradients at the
outputs of these functions. These gradients and the inputs determine the diagonal exactly
(:mod:`contrastive_curvature.network.layer_parts`), for any connection of the layers.

A parameter may have no rule: a function changes it before it is applied, or its layer runs in another thread or in a
script. Only such parameters go through ``torch.func``, with one warning. Such parameters are detected when a function
without a rule uses them, or by the comparison of every batch with autograd
(:mod:`contrastive_curvature.network.layer_tape`). A run of functions that keep each point in its place needs none.

Kronecker factors treat every point separately. A layer's weight has ``G (x) A``: ``A = mean_i a_i a_i^T`` of its inputs
and ``G = sum_i B_i^T H_ii B_i`` with the Jacobian ``B_i`` of the raw outputs with respect to the layer's outputs. This
is the K-FAC approximation: inputs and output curvature count as independent over the points (and, for convolutions,
over the positions: K-FAC-expand). It is exact for one point, or if all points share the inputs or the blocks. Biases
and other vectors have their exact block. The cross terms of fixes that couple points are left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.hessian.blocks import Blocks, SignedFactor
from contrastive_curvature.hessian.cross import CrossBlocks, tangent_axes
from contrastive_curvature.hessian.node_blocks import NodeBlocks
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.network.call import describe_points
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.inputs import Inputs, few_points, input_length, map_tensors
from contrastive_curvature.network.layer_parts import MatrixBlock, ParameterBlock, chunk_of_entries
from contrastive_curvature.network.layer_tape import (
    LayerAnalysis,
    Tape,
    analyse_layers,
    calls_of,
    make_blocks,
    unproven,
)
from contrastive_curvature.network.module import ModulePullback
from contrastive_curvature.network.pullback import KronFactors, own_name
from contrastive_curvature.network.recorder import Recorder
from contrastive_curvature.network.threads import private_copy
from contrastive_curvature.pairs.relation import chunks

_T = TypeVar("_T")

_Terms = Callable[[], Iterator[tuple[ParameterBlock, Tensor]]]
"""A function that yields blocks and terms of their diagonals."""

_UNKNOWN = LayerAnalysis()

_CHUNK_ELEMENTS = 2**25
"""Numbers that the inputs of the layers and one or more gradients of a chunk of points may hold: 128 MiB in float32."""

_COLUMN_ELEMENTS = 2**21
"""Numbers that the gradients of several columns may hold together: where one has more, stacking them gains nothing."""

_HELD_ELEMENTS = 2**27
"""Numbers that the gradients of all outputs at some layers may hold: 512 MiB in float32; fewer need more passes."""

_TILE_POINTS = 2048
"""Of a tile of cross terms, where points are small: the pairs of a tile are held too."""

BLOCK_ENTRIES = 4096
"""Entries of a parameter outside layers that gets its exact block: 64 MiB in float32, decomposed in seconds."""

FACTOR_SIZE = 16384
"""Rows of the largest factor: 1 GiB in float32, twice that when it is decomposed, which takes an hour."""

_PRODUCT_ELEMENTS = 2**23
"""Numbers in a chunk of Jacobians that is multiplied with itself."""


class NotVerifiedError(Exception):
    """Uses of some parameters have no rule, differ from the first batch, or disagree with autograd.

    Args:
        numbers: Numbers of these parameters.
    """

    def __init__(self, numbers: set[int]) -> None:
        super().__init__(f"parameters {sorted(numbers)}")
        self.numbers = numbers


class LayerwisePullback(ModulePullback):
    """All trainable parameters of any module: ``diag``, ``kron``, cross terms and covariances of the outputs.

    :class:`ModulePullback` computes the other structures and products.

    Args:
        encoder: The analysed encoder, in evaluation mode.

    Attributes:
        by_func: Numbers of the parameters that go through ``torch.func``.
        analysis: Results of a run of the first batch's first points.

    Raises:
        UnsupportedError: Gradients of a parameter are not derivatives.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(encoder)
        _refuse_gradients(encoder)
        self.names = list(self.params)
        self.trainable = [p for p in encoder.parameters() if p.requires_grad]
        self.analysis = _UNKNOWN
        self._example: Inputs | None = None
        self.by_func: set[int] = set()
        self.general: ModulePullback | None = None
        self._kinds: list[str] | None = None
        self._running = _without_backward_hooks(encoder)

    @override
    def forward(self, x: Inputs) -> tuple[Tensor, Any]:
        if self.analysis is _UNKNOWN and input_length(x):
            self._example = few_points(x)
        return super().forward(x)

    def diag(self, context: Any, blocks: Blocks) -> Tensor:
        """See :meth:`Pullback.diag`; uses no Jacobian of the network."""

        def terms() -> Iterator[tuple[ParameterBlock, Tensor]]:
            for rows, tape in self.tapes(context):
                yield from self._squares(tape, blocks[rows].signed_factor())

        return self._diagonal(blocks.u, terms, ModulePullback.diag, context, blocks)

    def coupled_diag(self, context: Any, hessian: OutputHessian) -> Tensor:
        """See :meth:`Pullback.coupled_diag`; in a single tile, blocks and cross terms share their backward passes."""
        fits = hessian.coupled and 0 < len(hessian) <= self.tile_diag(hessian.z.shape[1])
        shared = _shared_columns(hessian) if fits else None
        if shared is None:
            return super().coupled_diag(context, hessian)
        columns, weight, rest = shared

        def terms() -> Iterator[tuple[ParameterBlock, Tensor]]:
            tape = self.tape(context)
            for _, group in self.backward(tape, columns):
                yield from ((block, block.weighted(b, block, b, weight)) for block, b in group)
            yield from self._squares(tape, rest)

        return self._diagonal(hessian.z, terms, ModulePullback.coupled_diag, context, hessian)

    def cross_diag(self, rows: Any, columns: Any, cross: CrossBlocks) -> Tensor:
        """See :meth:`Pullback.cross_diag`; uses no Jacobian of the network."""
        if not all(cross.shape):
            return cross.u_rows.new_zeros(self.n_params)

        def terms() -> Iterator[tuple[ParameterBlock, Tensor]]:
            left = self.tape(rows)
            yield from _cross_diagonals(left, left if cross.symmetric else self.tape(columns), cross)

        return self._diagonal(cross.u_rows, terms, ModulePullback.cross_diag, rows, columns, cross)

    def kron(self, context: Any, blocks: Blocks) -> KronFactors:
        """See :meth:`Pullback.kron`; each ``A`` is a sum over points.

        A matrix that multiplies the inputs of every position has ``[G, A]``; several calls of the matrix count as more
        positions. A vector has its exact block. Other parameters (added tokens and tables, embeddings, grouped
        convolutions) have their exact block up to :data:`BLOCK_ENTRIES` entries, and ``[G, A]`` above: their first axis
        acts as a layer's outputs, and the other axes act as positions whose inputs are unit vectors.

        Raises:
            UnsupportedError: A parameter has other factors in this batch than in earlier batches, so their sum would be
                meaningless.
        """
        factors = self.run_layers(context, lambda: self._layer_factors(context, blocks))
        kinds = [self._kind(number) for number in range(len(self.trainable))]
        for number in sorted(self.by_func):
            alone = ModulePullback(self.encoder, only={self.names[number]})
            if kinds[number] == "block":
                factors[number] = [alone.full(context, blocks)]
                continue
            p = self.trainable[number]
            z, own_context = alone.forward(context)
            b = alone.jacobians(own_context, z).unflatten(2, (_rows(p), -1))
            g = torch.einsum("ndct,ndet->ce", b, blocks.matmul(b.flatten(2)).view_as(b))
            factors[number] = [g, _identity(p, len(blocks))]
        if self._kinds is not None and kinds != self._kinds:
            changed = next(k for k, (old, new) in enumerate(zip(self._kinds, kinds, strict=True)) if old != new)
            name = own_name(self.names[changed])
            _refuse_kron(f"a later batch uses the parameter {name!r} in another way than the first")
        self._kinds = kinds
        return factors

    def _kind(self, number: int) -> str:
        """Return the kind of a parameter's factors; factors of two batches add up only if they have the same kind."""
        p, analysis = self.trainable[number], self.analysis
        is_matrix = number in analysis.matrices or number not in analysis.used
        if p.ndim > 1 and is_matrix and number not in self.by_func:
            return "matrix"
        return "block" if p.ndim <= 1 or p.numel() <= BLOCK_ENTRIES else "entries"

    def _layer_factors(self, context: Any, blocks: Blocks) -> KronFactors:
        """Return factors of all parameters in layers; the factors of other parameters are zero."""
        kinds = [self._kind(number) for number in range(len(self.trainable))]
        out = [self._zeros(number, kind, blocks.u) for number, kind in enumerate(kinds)]
        for rows, tape in self.tapes(context):
            for block in tape.blocks:
                if kinds[block.number] == "matrix" and isinstance(block, MatrixBlock):
                    inputs = block.inputs[:, 0]  # without groups
                    a = inputs.flatten(0, 1)
                    out[block.number][1].addmm_(a.mT, a, alpha=1 / inputs.shape[1])
            for number, p in enumerate(self.trainable):
                if kinds[number] == "entries" and number not in self.by_func:
                    out[number][1] += _identity(p, len(tape.z)).to(tape.z)
            factor = blocks[rows].signed_factor()
            for some, group in self.backward(tape, factor.columns):
                signs = factor.signs[some]
                jacobians: dict[int, Tensor] = {}
                for block, b in group:
                    number = block.number
                    if kinds[number] == "matrix":
                        flat = b[:, :, 0]
                        signed = flat * signs[:, :, None, None]
                        out[number][0].addmm_(signed.flatten(0, 2).mT, flat.flatten(0, 2))
                        continue
                    if number not in jacobians:
                        jacobians[number] = b.new_zeros(b.shape[1], b.shape[0], self.trainable[number].numel())
                    for entries, chunk in block.jacobians(b, chunk_of_entries(b)):
                        place = entries if block.entries is None else block.entries[entries]
                        jacobians[number][..., place] += chunk
                for number, jacobian in jacobians.items():
                    _add_products(out[number][0], jacobian, signs)
        return out

    def _zeros(self, number: int, kind: str, like: Tensor) -> list[Tensor]:
        p = self.trainable[number]
        rows = len(p) if kind == "matrix" else _rows(p)
        sizes = (p.numel(),) if kind == "block" else (rows, p.numel() // max(1, rows))
        if max(sizes) > FACTOR_SIZE:
            name = own_name(self.names[number])
            _refuse_kron(
                f"the parameter {name!r}, shape {tuple(p.shape)}, has a factor of {max(sizes)} rows. Freeze it"
            )
        return [like.new_zeros(size, size) for size in sizes]

    def output_covariance(self, context: Any, variance: Tensor) -> Tensor:
        """See :meth:`Pullback.output_covariance`; uses no Jacobian of the network.

        Raises:
            InputError: The number of variances is not the number of trainable parameters.
        """
        if variance.shape != (self.n_params,):
            hint = "Was a parameter frozen, added or replaced since the variances were computed?"
            wanted = f"the {variance.numel()} trainable parameters that have variances"
            raise InputError("model", wanted, f"{self.n_params} of them", hint)
        dim = self.encoder.dim
        own = self.split(variance)

        def compute() -> Tensor:
            out = []
            for _, tape in self.tapes(context, columns=dim):
                covariance = tape.z.new_zeros(len(tape.z), dim, dim)
                for block, b in tape.reached(tape.gradients(tape.axes)):
                    covariance += block.covariance(b, own[block.number][block.place])
                out.append(covariance)
            return torch.cat(out) if out else variance.new_zeros(0, dim, dim)

        covariance = self.run_layers(context, compute)
        if self.general is not None:
            variance = torch.cat([own[k] for k in sorted(self.by_func)])
            with torch.no_grad():
                covariance += self.general.output_covariance(context, variance)
        return covariance

    def tile_diag(self, dim: int) -> int:
        """See :meth:`Pullback.tile_diag`; the largest number of points in one graph."""
        if self.analysis is _UNKNOWN and self._example is None:
            return super().tile_diag(dim)
        self.run_layers(self._example, lambda: None)
        if self.general is not None:
            return min(_TILE_POINTS, self.general.tile_diag(dim))
        size = self.analysis.inputs + 2 * self.analysis.gradients
        return max(1, min(_TILE_POINTS, 4 * _CHUNK_ELEMENTS // size))

    def run_layers(self, context: Any, compute: Callable[[], _T]) -> _T:
        """Run ``compute`` on the layers; run it again if the batch uses parameters in an unknown way."""
        with torch.inference_mode(False), torch.enable_grad():
            if self.analysis is _UNKNOWN and input_length(context):
                self.analysis = self._analysed(few_points(context))
                if self.analysis.lacking:
                    self._give_up({*self.analysis.lacking})
            while True:
                try:
                    with torch.no_grad():
                        return compute()
                except NotVerifiedError as error:
                    self._give_up(error.numbers)

    def _analysed(self, few: Inputs) -> LayerAnalysis:
        """Return the analysis of the layers, which the encoder keeps for the next pullback."""
        key = (*self.names, describe_points(few))
        if self.encoder.layer_analysis is None or self.encoder.layer_analysis[0] != key:
            found = analyse_layers(self._running, self.trainable, _outside_inference(few))
            self.encoder.layer_analysis = key, found
            return found
        return self.encoder.layer_analysis[1]

    def tapes(self, context: Any, columns: int = 1) -> Iterator[tuple[slice, Tape]]:
        """Run points in chunks of bounded memory, for gradients of ``columns`` columns at once."""
        size = self.analysis.inputs + (1 + columns) * self.analysis.gradients
        for rows in chunks(input_length(context), _CHUNK_ELEMENTS * (1 if columns == 1 else 2) // size):
            yield rows, self.tape(self.slice_context(context, rows))

    def backward(self, tape: Tape, columns: Tensor) -> Iterator[tuple[slice, Iterator[tuple[ParameterBlock, Tensor]]]]:
        """Yield several of the columns (K, n, D) at a time, and the gradients of all blocks for these columns."""
        for some in chunks(len(columns), _COLUMN_ELEMENTS // max(1, len(tape.z) * self.analysis.gradients)):
            yield some, tape.reached(tape.gradients(columns[some]))

    def tape(self, context: Any) -> Tape:
        """Run the encoder once, and compare with autograd unless all layers are known to be right.

        Raises:
            NotVerifiedError: Parameters have a use without a rule, are used differently than for the first points, or
                disagree with autograd.
            UnsupportedError: The encoder has other outputs without gradients.
        """
        x = _outside_inference(context)
        with torch.enable_grad(), Recorder(list(self.trainable), self.analysis.lookups) as recorder:
            z = self._running(x)
        _check_fast_path(self._running, x, z)
        blocks, wrong = make_blocks(recorder.uses, self.analysis.places, z, self.by_func | recorder.unknown)
        wrong |= recorder.unknown - self.by_func
        tape = Tape(z, blocks)
        if not wrong and not recorder.proves(z):
            wrong = unproven(tape, self.trainable, self.by_func)
        if wrong:
            raise NotVerifiedError(wrong)
        return tape

    def _diagonal(self, like: Tensor, terms: _Terms, method: Callable[..., Tensor], context: Any, *rest: Any) -> Tensor:
        """Compute a diagonal (P,) from the layers, and by ``torch.func`` for the other parameters.

        Args:
            like: A tensor with the diagonal's dtype and device.
            terms: Terms of the layers.
            method: Method of :class:`ModulePullback` that computes the diagonal.
            context: First argument of the method, the context of some points.
            *rest: Its other arguments.
        """

        def compute() -> Tensor:
            out = like.new_zeros(self.n_params)
            vectors = self.split(out)
            for block, diagonal in terms():
                vectors[block.number][block.place] += diagonal
            return out

        out = self.run_layers(context, compute)
        if self.general is not None:
            with torch.no_grad():
                parts, entries = self.general.split(method(self.general, context, *rest)), self.split(out)
            for number, part in zip(sorted(self.by_func), parts, strict=True):
                entries[number].copy_(part)
        return out

    def _squares(self, tape: Tape, factor: SignedFactor) -> Iterator[tuple[ParameterBlock, Tensor]]:
        """Yield ``sum_ki sign_ki (J_i^T v_ki)^2`` of columns (K, n, D), by block."""
        for some, group in self.backward(tape, factor.columns):
            yield from ((block, block.diagonal(b, factor.signs[some])) for block, b in group)

    def _give_up(self, numbers: set[int]) -> None:
        """Use ``torch.func`` for these parameters from now on."""
        new = numbers - self.by_func
        self.by_func |= numbers
        self.general = ModulePullback(self.encoder, only={self.names[k] for k in self.by_func})
        names = [own_name(self.names[k]) for k in sorted(new)]
        shown = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
        msg = (
            f"model: the Jacobians of {len(names)} parameters ({shown}) are taken point by point, which is exact and "
            "slow: they are applied in a way that the layer-by-layer computation does not know."
        )
        warnings.warn(msg, UserWarning, stacklevel=2)


def _without_backward_hooks(encoder: Encoder) -> Encoder:
    """Return the encoder, or a copy without backward hooks, which may compute in every pass (BackPACK's do)."""
    if not any(module._backward_hooks or module._backward_pre_hooks for module in encoder.modules()):
        return encoder
    try:
        return private_copy(encoder)
    except Exception:
        return encoder


def _outside_inference(x: Any) -> Any:
    """Return a batch that autograd accepts."""
    return map_tensors(x, lambda t: t.clone() if t.is_inference() else t)


def _refuse_gradients(encoder: nn.Module) -> None:
    """Refuse parameters whose gradients are not derivatives of the outputs.

    Raises:
        UnsupportedError: A complex parameter, or an embedding with ``scale_grad_by_freq``.
    """
    for name, p in encoder.named_parameters():
        if p.requires_grad and p.is_complex():
            raise UnsupportedError(
                f"model: the parameter {own_name(name)!r} is complex. Use two real parameters instead, or freeze it."
            )
    for name, module in encoder.named_modules():
        scaled = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.scale_grad_by_freq
        if scaled and module.weight.requires_grad:
            raise UnsupportedError(
                f"model: {own_name(name)!r} has scale_grad_by_freq=True: its gradients are no derivatives. Set False."
            )


def _check_fast_path(encoder: nn.Module, x: Inputs, z: Tensor) -> None:
    """Refuse a transformer whose outputs without gradients differ from ``z``.

    Raises:
        UnsupportedError: They differ: without gradients, ``nn.TransformerEncoder`` sets padded positions to zero.
    """
    if not any(isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)) for module in encoder.modules()):
        return
    with torch.no_grad():
        other = encoder(x)
    if bool((other - z).abs().amax() > 1e-2 * z.abs().amax()):
        raise UnsupportedError(
            "model: its outputs depend on padded positions, where nn.TransformerEncoder puts zeros without gradients. "
            "Leave them out of the pooling, or use nn.TransformerEncoder(..., enable_nested_tensor=False)."
        )


def _add_products(out: Tensor, jacobian: Tensor, signs: Tensor) -> None:
    """Add ``sum_kip sign_ki j_kip j_kip^T`` (rows, rows) of Jacobians (n, K, rows * P) and signs (K, n)."""
    rows = len(out)
    for some in chunks(len(jacobian), _PRODUCT_ELEMENTS // max(1, jacobian[0].numel())):
        columns = jacobian[some].unflatten(2, (rows, -1)).movedim(3, 2)
        weights = signs[:, some].T.unsqueeze(2).expand(columns.shape[:3]).flatten()
        flat = columns.flatten(0, 2)
        out.addmm_((flat * weights.unsqueeze(1)).mT, flat)


def _refuse_kron(why: str) -> None:
    """Refuse parameters or a batch without Kronecker factors.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(f"structure 'kron': {why}. Use the structure 'diag', or subset_of_weights='last_layer'.")


def _rows(p: Tensor) -> int:
    """Return the length of the first axis longer than one."""
    return next((size for size in p.shape if size > 1), 1)


def _identity(p: Tensor, share: float) -> Tensor:
    """Return the second moment of the unit vectors that replace a parameter's inputs outside layers."""
    others = p.numel() // _rows(p)
    return torch.eye(others, dtype=p.dtype, device=p.device) * (share / others)


def _shared_columns(hessian: OutputHessian) -> tuple[Tensor, Tensor, SignedFactor] | None:
    """Split a coupled Hessian of N points into shared columns and columns of single points.

    ``H_ij = sum_k w_ij a_ki a_kj^T + [i = j] sum_c sign_ci v_ci v_ci^T`` with the tangent axes ``a_ki = P_i e_k /
    n_i``: the multiple of the projector ``P_i`` in a diagonal block is one more weight of these axes, so the rest of
    the block needs only two columns.

    Returns:
        The columns ``a`` (D, N, D), the weights ``w`` (N, N) and the columns of single points; ``None`` for a Hessian
        of another form.
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


def _cross_diagonals(left: Tape, right: Tape, cross: CrossBlocks) -> Iterator[tuple[ParameterBlock, Tensor]]:
    """Yield the diagonal of ``sum_ij J_i^T H_ij J_j`` by block; ``left`` and ``right`` may be the same object.

    Raises:
        NotVerifiedError: The two sides use the parameters in different ways.
    """
    numbers = [[block.number for block in tape.blocks] for tape in (left, right)]
    if numbers[0] != numbers[1]:
        raise NotVerifiedError({*numbers[0], *numbers[1]})

    def pulled(
        places: Sequence[int], of_left: Tensor, of_right: Tensor
    ) -> Iterator[tuple[ParameterBlock, Tensor, ParameterBlock, Tensor]]:
        """Yield the blocks on both sides that gradients reach, with these gradients for columns (K, n, D)."""
        at_left = left.gradients(of_left, [left.blocks[k] for k in places])
        at_right = at_left if right is left else right.gradients(of_right, [right.blocks[k] for k in places])
        for one, other in ((left.blocks[k], right.blocks[k]) for k in places):
            rows = one.gradients(at_left)
            columns = rows if right is left else other.gradients(at_right)
            if rows is not None and columns is not None:
                yield one, rows, other, columns

    if cross.c is None and cross.roots is None:
        of_rows, of_columns = tangent_axes(cross.u_rows, cross.n_rows), tangent_axes(cross.u_columns, cross.n_columns)
        # One axis at a time: the gradients of all axes at all layers are never in memory together.
        for a, b in zip(of_rows.transpose(0, 1).split(1), of_columns.transpose(0, 1).split(1), strict=True):
            for one, rows, other, columns in pulled(range(len(left.blocks)), a, b):
                yield one, one.weighted(rows, other, columns, -cross.y)
        return
    points = len(left.z) + (0 if right is left else len(right.z))
    for group in _groups(left.blocks, left.z.shape[1] * points // max(1, len(left.z))):
        for one, rows, other, columns in pulled(group, left.axes, right.axes):
            yield one, one.cross(rows, other, columns, cross.matmul)


def _groups(blocks: Sequence[ParameterBlock], copies: int) -> Iterator[list[int]]:
    """Yield numbers of blocks whose gradients fit into memory together, last layers first: their passes are short."""
    group: list[int] = []
    for k in reversed(range(len(blocks))):
        calls = calls_of(blocks[number] for number in [*group, k])
        if group and copies * sum(call.shape.numel() for call in calls) > _HELD_ELEMENTS:
            yield group
            group = []
        group.append(k)
    yield group
