"""Where the points of a batch lie along the axes of a tensor that a layer puts out.

Most layers have them in front; attention of torch has positions in front, windows and frames are folded into the axis
of the points, and tables of positions have none.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Fold", "Layout", "by_point", "candidates", "fits", "separates"]


class Fold(Enum):
    """What an axis holds beside the points."""

    NONE = "points"
    MAJOR = "(points, positions), flattened"
    MINOR = "(positions, points), flattened"


class Layout(NamedTuple):
    """Where the points lie.

    Attributes:
        axis: The axis.
        fold: What else it holds.
    """

    axis: int
    fold: Fold = Fold.NONE


def by_point(t: Tensor, layout: Layout, n: int) -> Tensor:
    """A tensor as (n, positions of a folded axis or 1, *the other axes)."""
    axis, fold = layout
    if fold is Fold.NONE:
        return (t.movedim(axis, 0) if axis else t).unsqueeze(1)
    if fold is Fold.MAJOR:
        return t.unflatten(axis, (n, -1)).movedim((axis, axis + 1), (0, 1))
    return t.unflatten(axis, (-1, n)).movedim((axis + 1, axis), (0, 1))


def candidates(shape: torch.Size, axes: tuple[int, ...], n: int) -> list[Layout]:
    """Layouts that a tensor of this shape may have, the likely ones first."""
    folded = [j for j in axes if shape[j] > n and shape[j] % n == 0]
    found = [Layout(j) for j in axes if shape[j] == n]
    return found + [Layout(j, fold) for fold in (Fold.MAJOR, Fold.MINOR) for j in folded]


def fits(shape: torch.Size, layout: Layout, n: int) -> bool:
    """Whether a tensor of another batch can have this layout."""
    if layout.axis >= len(shape):
        return False
    size = shape[layout.axis]
    return size == n if layout.fold is Fold.NONE else size % n == 0


def separates(layout: Layout, n: int, of_first: Tensor, of_others: Tensor) -> bool:
    """Whether gradients that start from the first point's output alone, and from all others', lie where they should."""
    first, others = by_point(of_first, layout, n), by_point(of_others, layout, n)
    return not bool(first[1:].any()) and not bool(others[0].any())
