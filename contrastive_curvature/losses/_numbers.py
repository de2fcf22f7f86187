"""Numbers of either sign among the options of a loss."""

from __future__ import annotations

import math

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError, expected

__all__ = ["check_finite_number", "check_temperature"]


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


SMALLEST_TEMPERATURE = 1e-6
"""Curvatures go with the inverse square of a temperature; at a smaller one float32 has no digits of a cosine left."""


def check_temperature(value: object) -> float:
    """Return ``value`` if it is a temperature that cosines can be divided by.

    Raises:
        InputTypeError: ``value`` is not an int or a float.
        InputError: It is not positive and finite, or too small.
    """
    number = validate.number("temperature", value, positive=True)
    if number < SMALLEST_TEMPERATURE:
        raise InputError(expected("temperature", f"a number of at least {SMALLEST_TEMPERATURE:g}", number))
    return number
