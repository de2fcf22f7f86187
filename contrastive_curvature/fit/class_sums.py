"""Sums of the embeddings of every class, taken while batches pass by."""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature.fit.class_centres import MOST_NUMBERS, ClassCentres
from contrastive_curvature.parts.class_table import ClassTable, ClassTableCollector
from contrastive_curvature.parts.rows import RowCollector, Rows

__all__ = ["TYPICAL", "ClassSums", "centres_of"]

TYPICAL = "typical"
"""Name of the points that say which position between classes is typical."""

_TYPICAL = 2000

_OUTPUTS, _TARGETS = "outputs", "targets"


class ClassSums:
    """Makes the :class:`ClassCentres` of a stream of labelled outputs; they need not be in memory together.

    Args:
        limited: Whether sums of too many numbers for centres are given up.
    """

    def __init__(self, *, limited: bool = True) -> None:
        self._table, self._typical = ClassTableCollector(), RowCollector(_TYPICAL)
        self._limited, self._n = limited, 0
        self._too_many = False

    def add(self, outputs: Tensor, labels: Tensor, numbers: Tensor | None = None) -> None:
        """Take a batch into account.

        Args:
            outputs: Raw outputs, shape (B, D).
            labels: Class labels, shape (B,).
            numbers: Of the points, shape (B,); ``None`` counts them.
        """
        if self._too_many:
            return
        self._table.add(outputs, labels)
        if numbers is None:
            numbers = torch.arange(self._n, self._n + len(outputs))
        self._typical.add(numbers, {_OUTPUTS: outputs, _TARGETS: labels})
        self._n += len(outputs)
        # More classes only follow.
        self._too_many = self._limited and self._table.size > MOST_NUMBERS

    def found(self) -> tuple[ClassTable | None, Rows]:
        """Numbers and sums of all classes, and the points that say what is typical."""
        table = None if self._too_many else self._table.table()
        if self._limited and table is not None and table.sums.numel() > MOST_NUMBERS:
            table = None
        return table, self._typical.rows()

    def centres(self) -> ClassCentres | None:
        """The centres, or ``None``, see :meth:`ClassCentres.of`."""
        return centres_of(*self.found())


def centres_of(table: ClassTable | None, typical: Rows) -> ClassCentres | None:
    """Centres of classes; ``None`` where there are none, or they say nothing or cost too much.

    Args:
        table: Numbers and sums of all classes.
        typical: Some of the points.
    """
    if table is None or not len(typical):
        return None
    columns = typical.columns
    return ClassCentres.from_sums(
        table.labels, table.sums, columns[_OUTPUTS], columns[_TARGETS], int(table.counts.sum())
    )
