"""Kronecker factors of the parameter curvature, every point on its own.

A layer's weight gets ``G (x) A``: ``A = mean_i a_i a_i^T`` of its inputs and ``G = sum_i B_i^T H_ii B_i`` with the
Jacobian ``B_i`` of the raw outputs with respect to the layer's outputs. The approximation is that of K-FAC: inputs and
output curvature are taken as independent over the points (and, for convolutions, over the positions: K-FAC-expand). It
is exact for one point, or where all points share the inputs or the blocks. Biases and other vectors get their exact
block of what is kept.

Fixes whose output Hessian couples points have cross terms besides, which are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.network.inputs import Inputs
from contrastive_curvature.network.layer_parts import MatrixJacobian
from contrastive_curvature.network.layer_tape import ParameterBlock
from contrastive_curvature.network.module import ModulePullback
from contrastive_curvature.network.pullback import KronFactors, own_name
from contrastive_curvature.pairs.relation import chunks

if TYPE_CHECKING:
    from contrastive_curvature.network.layerwise import LayerwisePullback

BLOCK_ENTRIES = 4096
"""Entries of a parameter outside layers that gets its exact block: 64 MiB in float32, decomposed in seconds."""

FACTOR_SIZE = 16384
"""Rows of the largest factor: 1 GiB in float32, twice that when it is decomposed, which takes an hour."""

_CHUNK_ELEMENTS = 2**23
"""Numbers in a chunk of Jacobians."""


def kron_kinds(pullback: LayerwisePullback) -> list[str]:
    """Return what the factors of every parameter are; those of batches add up where it stays the same."""
    matrices, used = pullback.analysis.matrices - pullback.by_func, pullback.analysis.used | pullback.by_func

    def kind(number: int, p: Tensor) -> str:
        if p.ndim > 1 and number in matrices:
            return "matrix"
        if p.ndim > 1 and number not in used:
            return "none"
        return "block" if p.ndim <= 1 or p.numel() <= BLOCK_ENTRIES else "entries"

    return [kind(number, p) for number, p in enumerate(pullback.trainable)]


def kron_factors(pullback: LayerwisePullback, x: Inputs, blocks: Blocks) -> KronFactors:
    """Return the factors of a batch, whose ``A`` are sums over points; those of batches add up.

    A matrix that multiplies the inputs of every position has ``[G, A]``; several calls with it count as more positions.
    A vector has its exact block. Other parameters (tokens and tables that are added, embeddings, grouped convolutions)
    have their exact block up to :data:`BLOCK_ENTRIES` entries, and above that ``[G, A]`` too: their first axis takes
    the place of a layer's outputs, and the other axes that of positions whose inputs are unit vectors.
    """
    out = pullback.run_layers(x, lambda: _layer_factors(pullback, x, blocks))
    kinds = kron_kinds(pullback)
    for number in sorted(pullback.by_func):
        if kinds[number] == "block":
            out[number] = [_of_one(pullback, number).full(x, blocks)]
        else:
            g = _entries_factor(pullback, number, x, blocks)
            out[number] = [g, _identity(pullback.trainable[number], len(blocks))]
    return out


def _layer_factors(pullback: LayerwisePullback, x: Inputs, blocks: Blocks) -> KronFactors:
    """Return factors of all parameters that are seen in layers; those of the others are zero."""
    kinds = kron_kinds(pullback)
    out = [_zeros(pullback, number, kind, blocks.u) for number, kind in enumerate(kinds)]
    for rows, tape in pullback.tapes(x):
        for block in tape.blocks:
            if kinds[block.number] == "matrix" and isinstance(block.jacobian, MatrixJacobian):
                inputs = block.jacobian.inputs[:, 0]  # without groups
                a = inputs.flatten(0, 1)
                out[block.number][1].addmm_(a.mT, a, alpha=1 / inputs.shape[1])
        for number, p in enumerate(pullback.trainable):
            if kinds[number] in ("entries", "none") and number not in pullback.by_func:
                out[number][1] += _identity(p, len(tape.z)).to(tape.z)
        factor = blocks[rows].signed_factor()
        for group, signs in pullback.backward(tape, factor.columns, factor.signs):
            jacobians: dict[int, Tensor] = {}
            for block, b in group:
                if kinds[block.number] == "matrix":
                    flat = b[:, :, 0]
                    signed = flat * signs[:, :, None, None]
                    out[block.number][0].addmm_(signed.flatten(0, 2).mT, flat.flatten(0, 2))
                else:
                    _add_jacobians(jacobians, block, b, pullback.trainable[block.number].numel())
            for number, jacobian in jacobians.items():
                _add_products(out[number][0], jacobian, signs)
    return out


def _add_jacobians(out: dict[int, Tensor], block: ParameterBlock, b: Tensor, size: int) -> None:
    """Add a block to the Jacobians of its parameter, (n, K, size) by its number."""
    if block.number not in out:
        out[block.number] = b.new_zeros(b.shape[1], b.shape[0], size)
    for entries, chunk in block.jacobian.jacobians(b):
        place = entries if block.jacobian.entries is None else block.jacobian.entries[entries]
        out[block.number][..., place] += chunk


def _add_products(out: Tensor, jacobian: Tensor, signs: Tensor) -> None:
    """Add ``sum_kip sign_ki j_kip j_kip^T`` (rows, rows) of Jacobians (n, K, rows * P) and signs (K, n)."""
    rows = len(out)
    for some in chunks(len(jacobian), _CHUNK_ELEMENTS // max(1, jacobian[0].numel())):
        columns = jacobian[some].unflatten(2, (rows, -1)).movedim(3, 2)
        weights = signs[:, some].T.unsqueeze(2).expand(columns.shape[:3]).flatten()
        flat = columns.flatten(0, 2)
        out.addmm_((flat * weights.unsqueeze(1)).mT, flat)


def _of_one(pullback: LayerwisePullback, number: int) -> ModulePullback:
    """Return the pullback to one parameter."""
    return ModulePullback(pullback.encoder, only={pullback.names[number]})


def _entries_factor(pullback: LayerwisePullback, number: int, x: Inputs, blocks: Blocks) -> Tensor:
    """Return ``G`` of a parameter outside layers, its axes after the first in the place of positions."""
    p, alone = pullback.trainable[number], _of_one(pullback, number)
    z, context = alone.forward(x)
    b = alone.jacobians(context, z).unflatten(2, (_rows(p), -1))
    curved = blocks.matmul(b.flatten(2)).view_as(b)
    return torch.einsum("ndct,ndet->ce", b, curved)


def _zeros(pullback: LayerwisePullback, number: int, kind: str, like: Tensor) -> list[Tensor]:
    p = pullback.trainable[number]
    sizes: tuple[int, ...] = (_rows(p), p.numel() // _rows(p))
    if kind == "block":
        sizes = (p.numel(),)
    elif kind in ("matrix", "none"):
        sizes = (len(p), p.shape[1:].numel())
    if max(sizes) > FACTOR_SIZE:
        name = own_name(pullback.names[number])
        refuse_kron(f"the parameter {name!r}, shape {tuple(p.shape)}, has a factor of {max(sizes)} rows. Freeze it")
    return [like.new_zeros(size, size) for size in sizes]


def refuse_kron(why: str) -> None:
    """Refuse what has no Kronecker factors.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(f"structure 'kron': {why}. Use the structure 'diag', or subset_of_weights='last_layer'.")


def _rows(p: Tensor) -> int:
    """Return the length of the first axis that has one."""
    return next((size for size in p.shape if size > 1), 1)


def _identity(p: Tensor, share: float) -> Tensor:
    """Return the second moment of the unit vectors in the place of the inputs of a parameter outside layers."""
    others = p.numel() // _rows(p)
    return torch.eye(others, dtype=p.dtype, device=p.device) * (share / others)
