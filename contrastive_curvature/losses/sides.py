"""Anchors and their candidates: all points of one tower, or the points of two towers against each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.hessian.sphere import check_outputs
from contrastive_curvature.pairs.relation import LabelRelation, check_labels, row_ranges


@dataclass(frozen=True)
class Side:
    """One direction: a range of anchors, and the range of their candidates.

    Args:
        anchors: Range among all N points.
        candidates: Range among all N points.
    """

    anchors: slice
    candidates: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers A of anchors and M of candidates."""
        return self.anchors.stop - self.anchors.start, self.candidates.stop - self.candidates.start

    def row_blocks(self, width: int = 1) -> Iterator[slice]:
        """Iterate over ranges of anchors, in blocks of pairs for which the caller stores ``width`` numbers each."""
        count, candidates = self.shape
        for rows in row_ranges(count, candidates * width):
            yield moved(rows, self.anchors.start)


def moved(part: slice, by: int) -> slice:
    """Shift a range by ``by``."""
    return slice(part.start + by, part.stop + by)


Sides = tuple[Side, ...]
"""All directions of a loss: each point is an anchor in at most one of them, and a candidate in at most one."""


def one_tower(n: int) -> Sides:
    """Make every point an anchor, and a candidate of all other points."""
    return (Side(slice(0, n), slice(0, n)),)


def two_towers(first: int, n: int, directions: str = "both") -> Sides:
    """Make the points of tower a (the ``first`` of n) and tower b candidates of each other, by ``directions``."""
    a, b = slice(0, first), slice(first, n)
    sides = {"a": Side(a, b), "b": Side(b, a)}
    return (sides["a"], sides["b"]) if directions == "both" else (sides[directions],)


def joined_towers(
    z_a: Tensor, z_b: Tensor, labels: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, LabelRelation, int]:
    """Join the outputs of both towers: outputs (N + M, D), the relation of their labels, and N."""
    z_a, z_b = check_outputs(z_a, "z_a"), check_outputs(z_b, "z_b")
    if z_a.shape[1] != z_b.shape[1]:
        wanted = f"as many dimensions as the first tower, {z_a.shape[1]}"
        raise InputError("z_b", wanted, z_b.shape[1], "Cosines are between vectors of one space.")
    if (z_a.dtype, z_a.device) != (z_b.dtype, z_b.device):
        raise InputTypeError("z_b", f"{z_a.dtype} on {z_a.device}", f"{z_b.dtype} on {z_b.device}")
    if labels is None:
        if len(z_a) != len(z_b):
            hint = "z_a[i] belongs to z_b[i]; pass labels where that is not so."
            raise InputError("z_b", f"as many points as the first tower, {len(z_a)}", len(z_b), hint)
        both = torch.arange(len(z_a), device=z_a.device).repeat(2)
    else:
        both = torch.cat([check_labels(labels[0], len(z_a)), check_labels(labels[1], len(z_b))]).to(z_a.device)
    return torch.cat([z_a, z_b]), LabelRelation(both), len(z_a)
