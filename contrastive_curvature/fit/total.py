"""The contribution of a batch to a fit, and the sum of contributions, which merges over parts of the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.hessian.output import OutputHessian
from contrastive_curvature.losses.class_table import ClassTable
from contrastive_curvature.pairs.rows import Rows, united
from contrastive_curvature.structures import Structure
from contrastive_curvature.structures.structure import added

VALUE, COST = "value", "cost"
"""Names of sums over batches: the loss, and its non-negative version."""


class Part(NamedTuple):
    """Contribution of the n points of a batch to the sum for one set of parameters.

    Args:
        z: Raw outputs, shape (n, D).
        context: Context of these points for the pullback.
        blocks: Hessian blocks of single points.
        coupled: The Hessian with its cross terms, if the points are coupled only with each other.
        cross: Cross terms of the points with other points.
        terms: Other numbers to sum, by name.
        classes: Class labels, shape (n,), or ``None``.
        tower: Index of the set of parameters.
    """

    z: Tensor
    context: Any
    blocks: Blocks
    coupled: OutputHessian | None = None
    cross: Structure | None = None
    terms: Mapping[str, Tensor] = {}
    classes: Tensor | None = None
    tower: int = 0

    @classmethod
    def of_batch(cls, hessian: OutputHessian, context: Any, classes: Tensor | None, tower: int = 0) -> Part:
        """Build the part of a batch whose points are compared only with each other."""
        value, cost = hessian.loss_and_cost()
        derivatives = hessian.derivatives
        terms = {VALUE: value.double(), COST: cost.double()}
        counts = {"anchors": derivatives.anchors, "skipped": derivatives.skipped}
        terms |= {k: n if isinstance(n, Tensor) else torch.tensor(n, device="cpu") for k, n in counts.items()}
        return cls(
            hessian.z, context, hessian.blocks, hessian if hessian.coupled else None, None, terms, classes, tower
        )


@dataclass(frozen=True)
class Total:
    """Result of a pass over points. Totals add up, in any order and up to the rounding of sums.

    Args:
        n: Number of points.
        terms: Tensors that add up.
        kept: Stored points, by name.
        classes: Counts and sums of embeddings by class; ``None`` if targets are not class labels.
        shortest: The smallest norm of an output, the part of the data with its point (-1 for all data) and the point's
            position in this part, float64, shape (3,); ``None`` without a point, and for a first pass.
        curvature: The unclamped curvature; ``None`` for a first pass.
    """

    n: int = 0
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    kept: Mapping[str, Rows] = field(default_factory=dict)
    classes: ClassTable | None = None
    shortest: Tensor | None = None
    curvature: Structure | None = None

    def __add__(self, other: Total) -> Total:
        """Return the total over the points of both totals."""
        return Total(
            self.n + other.n,
            united(self.terms, other.terms, lambda one, two: one + two.to(one.device)),
            united(self.kept, other.kept, Rows.merged),
            self.classes if other.classes is None else other.classes.merged(self.classes),
            _shorter(self.shortest, other.shortest),
            added(self.curvature, other.curvature),
        )

    def to(self, device: torch.device) -> Total:
        """Return a copy on a device; numbers of points stay on the CPU."""
        terms = {name: part.to(device) for name, part in self.terms.items()}
        kept = {name: rows.to(device) for name, rows in self.kept.items()}
        classes = None if self.classes is None else self.classes.to(device)
        shortest = None if self.shortest is None else self.shortest.to(device)
        curvature = None if self.curvature is None else self.curvature.map(lambda tensor: tensor.to(device))
        return replace(self, terms=terms, kept=kept, classes=classes, shortest=shortest, curvature=curvature)


def _shorter(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the smaller of two :attr:`Total.shortest`; nothing is read from a GPU."""
    if one is None or other is None:
        return other if one is None else one
    other = other.to(one.device)
    return torch.where(one[0] <= other[0], one, other)
