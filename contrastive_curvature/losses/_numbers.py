"""Numbers of either sign among the options of a loss."""

from __future__ import annotations

import math

from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = ["check_finite_number"]


def check_finite_number(argument: str, value: object) -> float:
    """Return ``value`` if it is a finite number.

    Raises:
        InputTypeError: ``value`` is not an int or a float.
        InputError: It is NaN or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputTypeError(expected(argument, "a finite number", f"a {type(value).__name__}"))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InputError(expected(argument, "a finite number", number))
    return number
