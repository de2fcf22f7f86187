"""Pairs of inputs for verification, as arrays of a feature file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.transfer.arrays import Floats, Rows, check_features, check_range, check_rows
from contrastive_curvature.errors import InputError, expected

__all__ = ["Pairs", "check_pairs"]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of inputs, of which a verifier says whether both are of one class.

    Args:
        left: Row numbers in the test features, or in ``features`` where there are some, shape (P,).
        right: The same of each pair's other half.
        same: Whether both are of one class.
        fold: Number of the fold that the pair belongs to.
        features: Of inputs that need not be test inputs, shape (n, F); ``None`` where all are.
        people_in_train: Whether one of the two is of a class that training has, or ``None``.
    """

    left: Rows
    right: Rows
    same: NDArray[np.bool_]
    fold: Rows
    features: Floats | None = None
    people_in_train: NDArray[np.bool_] | None = None


def check_pairs(pairs: Pairs, tests: int, width: int) -> Pairs:
    """Check and convert pairs.

    Args:
        pairs: As they came.
        tests: Number of test inputs.
        width: Number of features F.

    Raises:
        InputError: A shape, a type or a value does not fit.
    """
    features = None if pairs.features is None else check_features("pairs_features", pairs.features, width)
    count, of = (tests, "test") if features is None else (len(features), "pairs'")
    left = check_range("pairs_left", check_rows("pairs_left", pairs.left, None), count, of)
    right = check_range("pairs_right", check_rows("pairs_right", pairs.right, len(left)), count, of)
    if (left == right).any():
        raise InputError(expected("pairs_right", "another input than pairs_left", "pairs of an input with itself"))
    seen = None if pairs.people_in_train is None else _truths("pairs_people_in_train", pairs.people_in_train, left)
    fold = check_rows("pairs_fold", pairs.fold, len(left))
    return Pairs(left, right, _truths("pairs_same", pairs.same, left), fold, features, seen)


def _truths(name: str, values: Any, left: Rows) -> NDArray[np.bool_]:
    found = np.asarray(values)
    if found.shape != left.shape or found.dtype.kind not in "biu" or not np.isin(found, (0, 1)).all():
        came = f"an array of {found.dtype}, shape {found.shape}"
        raise InputError(expected(name, f"{len(left)} truth values, or 0 and 1", came))
    return found.astype(bool)
