"""What a retriever returns: answers to queries, and asked rates beside observed ones."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from contrastive_curvature import validate
from contrastive_curvature.decisions.fitted import clopper_pearson


@dataclass(frozen=True, eq=False)
class Answers:
    """Answers to N queries, as arrays of shape (N,).

    Attributes:
        decision: ``"answer"``, ``"unsure"`` or ``"unknown"``.
        label: Label of the match, as passed with the gallery.
        neighbour: Identifier of the match: its position in the gallery of the fit, or what ``add`` returned.
        confidence: Probability that the match is right, in (0, 1), if one query in eleven is of a class that the
            gallery lacks, and the other queries are like the held-out queries.
        p_value: Share of the held-out queries that are at least as unlike the known inputs, in (0, 1].
    """

    decision: NDArray[np.str_]
    label: NDArray[Any]
    neighbour: NDArray[np.int64]
    confidence: NDArray[np.float64]
    p_value: NDArray[np.float64]

    def __len__(self) -> int:
        """Number N of queries."""
        return len(self.decision)

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with one row a query.

        Raises:
            UnsupportedError: pandas is not installed.
        """
        pandas = validate.package("to_pandas", "pandas", "test")
        return pandas.DataFrame({field.name: getattr(self, field.name) for field in fields(self)})


class Rate(NamedTuple):
    """An asked rate and the observed rate.

    Attributes:
        asked: The asked bound, or ``None``.
        observed: The observed rate; NaN if there are no queries.
        low: Lower end of the exact 95 % interval of the observed rate (Clopper and Pearson, 1934).
        high: Upper end of the interval.
        queries: Number of queries in the denominator.
    """

    asked: float | None
    observed: float
    low: float
    high: float
    queries: int

    @classmethod
    def of(cls, asked: float | None, happened: NDArray[np.bool_]) -> Rate:
        """Return the rate of what happened to queries (N,)."""
        n, count = len(happened), int(happened.sum())
        return cls(asked, count / n if n else math.nan, *clopper_pearson(count, n), n)


def as_array(labels: Sequence[Hashable]) -> NDArray[Any]:
    """Return labels as an array: of numbers or strings of one type, else of objects."""
    if len(kinds := {type(label) for label in labels}) == 1 and kinds <= {str, int, float, bool}:
        return np.array(labels)
    return np.fromiter(labels, dtype=object, count=len(labels))
