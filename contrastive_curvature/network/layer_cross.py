"""Diagonals of the cross terms between points, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from contrastive_curvature.hessian.cross import CrossBlocks, tangent_axes
from contrastive_curvature.hessian.node_blocks import NodeBlocks
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.hessian.signed import SignedFactor
from contrastive_curvature.network.layer_check import NotVerifiedError
from contrastive_curvature.network.layer_tape import Piece, Tape

__all__ = ["check_alike", "cross_diagonals", "shared_columns"]

_HELD_ELEMENTS = 2**27
"""Numbers that the gradients of all outputs at some layers may hold: 512 MiB in float32; fewer need more passes."""


def cross_diagonals(left: Tape, right: Tape, cross: CrossBlocks) -> Iterator[tuple[Piece, Tensor]]:
    """Diagonals of ``sum_ij J_i^T H_ij J_j``, one piece after the other.

    Args:
        left: The points i.
        right: The points j; may be the same object.
        cross: The blocks.

    Raises:
        NotVerifiedError: The two sides use the parameters in different ways.
    """
    check_alike(left, right)
    pairs = list(zip(left.pieces, right.pieces, strict=True))
    dim = left.z.shape[1]
    points = len(left.z) + (0 if right is left else len(right.z))
    for group in _groups(pairs, dim * points // max(1, len(left.z))):
        of_left = _axes(left, [a for a, _ in group])
        of_right = of_left if right is left else _axes(right, [b for _, b in group])
        for a, b in group:
            rows = a.gradients(of_left, len(left.z), left.z.dtype)
            columns = rows if right is left else b.gradients(of_right, len(right.z), right.z.dtype)
            if rows is not None and columns is not None:
                yield a, a.part.cross(rows, b.part, columns, cross)


def check_alike(left: Tape, right: Tape) -> None:
    """Refuse two sides that use the parameters in different ways.

    Raises:
        NotVerifiedError: They do.
    """
    numbers = [piece.number for piece in left.pieces]
    if numbers != [piece.number for piece in right.pieces]:
        raise NotVerifiedError({*numbers, *(piece.number for piece in right.pieces)})


def shared_columns(hessian: OutputHessian) -> tuple[Tensor, Tensor, SignedFactor] | None:
    """A coupled Hessian as columns that all points share, and columns of each point.

    ``H_ij = sum_k w_ij a_ki a_kj^T + [i = j] sum_c sign_ci v_ci v_ci^T`` with the tangent axes
    ``a_ki = P_i e_k / n_i``: the multiple of the projector in the diagonal blocks is one more weight of these axes, so
    that two columns stay for the rest of the blocks.

    Args:
        hessian: Of N points.

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


def _axes(tape: Tape, pieces: list[Piece]) -> dict[int, list[Tensor]]:
    axes = torch.eye(tape.z.shape[1], dtype=tape.z.dtype, device=tape.z.device)
    return tape.gradients((axis.expand(len(tape.z), -1) for axis in axes), pieces)


def _groups(pairs: list[tuple[Piece, Piece]], copies: int) -> Iterator[list[tuple[Piece, Piece]]]:
    """Pieces whose gradients fit into memory together; from the last layers to the first, whose passes are longer."""
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
