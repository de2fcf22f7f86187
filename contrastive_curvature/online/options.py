"""What is refused before an online Laplace exists, and which laplace object carries its posterior."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.laplace import (
    ContrastiveDiagLaplace,
    ContrastiveDiagLLLaplace,
    ContrastiveFullLaplace,
    ContrastiveFullLLLaplace,
    ContrastiveKronLaplace,
    ContrastiveKronLLLaplace,
    ContrastiveLaplace,
)
from contrastive_curvature.network.inputs import input_length

__all__ = [
    "CLASSES",
    "check_numbers",
    "check_options",
    "check_probe",
    "describe_callable",
    "describe_options",
]

CLASSES: dict[tuple[str, str], type[ContrastiveLaplace]] = {
    ("last_layer", "diag"): ContrastiveDiagLLLaplace,
    ("last_layer", "full"): ContrastiveFullLLLaplace,
    ("last_layer", "kron"): ContrastiveKronLLLaplace,
    ("all", "diag"): ContrastiveDiagLaplace,
    ("all", "full"): ContrastiveFullLaplace,
    ("all", "kron"): ContrastiveKronLaplace,
}


def check_options(
    memory_factor: object, n_samples: object, n_data: object, subset_of_weights: str, hessian_structure: str
) -> None:
    """Check what decides over the posterior and its memory.

    Raises:
        InputError: An option is unknown or out of range.
        UnsupportedError: A structure that has no discounted sum.
    """
    number = isinstance(memory_factor, (int, float)) and not isinstance(memory_factor, bool)
    if not (number and 0 <= memory_factor < 1):  # type: ignore[operator]
        hint = "It is what a step forgets; a released hessian_memory_factor of 0.999 is 0.001 here."
        raise InputError(expected("memory_factor", "a number in [0, 1)", memory_factor, hint))
    for name, value, least in (("n_samples", n_samples, 1), ("n_data", n_data, 2)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(expected(name, f"a whole number of at least {least}", value))
    wanted = "'last_layer' or 'all', and 'diag', 'full' or 'kron'"
    names = "subset_of_weights, hessian_structure"
    if not (isinstance(subset_of_weights, str) and isinstance(hessian_structure, str)):
        came = f"a {type(subset_of_weights).__name__}, a {type(hessian_structure).__name__}"
        raise InputTypeError(expected(names, wanted, came))
    if (subset_of_weights, hessian_structure) in CLASSES:
        return
    if subset_of_weights == "subnetwork" or hessian_structure in ("lowrank", "gp"):
        msg = (
            f"subset_of_weights={subset_of_weights!r}, hessian_structure={hessian_structure!r}: batches of it do not "
            "add up to a discounted curvature. Use 'last_layer' or 'all' with 'diag', 'full' or 'kron'; after "
            "training, Laplace(online.encoder, likelihood='contrastive', ...) fits any structure post hoc."
        )
        raise UnsupportedError(msg)
    raise InputError(expected(names, wanted, f"{subset_of_weights!r}, {hessian_structure!r}"))


def check_numbers(**given: object) -> None:
    """Check that every argument is ``None`` or a positive, finite number.

    Raises:
        InputError: One is not.
    """
    for name, value in given.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < math.inf):  # type: ignore[operator]
            came = f"a {type(value).__name__}" if isinstance(value, Tensor) else value
            hint = "Other priors can be set on the object that laplace() returns."
            raise InputError(expected(name, "a positive number, or None", came, hint))


def check_probe(probe: object) -> None:
    """Check that the probe is a batch of two inputs or more.

    Raises:
        InputTypeError: Not a tensor or a mapping.
        InputError: Too few.
    """
    wanted = "a batch of two inputs or more, a tensor or a mapping of tensors"
    if not isinstance(probe, (Tensor, Mapping)):
        raise InputTypeError(expected("probe", wanted, f"a {type(probe).__name__}"))
    if input_length(probe) < 2:
        raise InputError(expected("probe", wanted, f"{input_length(probe)} of them"))


def describe_callable(function: object) -> str:
    """What can be told of a loss, a miner or a relation in one line, to know it again.

    The name of a function; of other objects the type and what their constructor was given, where they keep it under
    the same name. What a function refers to besides its arguments is not seen.

    Args:
        function: The callable, or ``None``.

    Returns:
        The line.
    """
    if function is None:
        return "the default"
    if isinstance(function, functools.partial):
        given = [*map(repr, function.args), *(f"{name}={value!r}" for name, value in function.keywords.items())]
        text = f"{describe_callable(function.func)} with {', '.join(given)}"
    elif is_dataclass(function):
        text = repr(function)
    elif hasattr(function, "__name__"):
        text = str(function.__name__)
    else:
        given = []
        for name in inspect.signature(type(function).__init__).parameters:
            value = getattr(function, name, None)
            if isinstance(value, (str, bool, int, float)):
                given.append(f"{name}={value!r}")
        text = f"{type(function).__name__}({', '.join(given)})"
    return " ".join(text.split())


def describe_options(options: Mapping[str, Any]) -> str:
    """All options that a discounted curvature depends on, as text, a line each.

    Args:
        options: Strings and numbers by name.

    Returns:
        The text.
    """
    return "\n".join(f"{name}={value!s}" for name, value in sorted(options.items()))
