"""Checks of the options of an online Laplace, their description as text, and the class of its posterior."""

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
    ContrastiveKronLowRankLLLaplace,
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
    ("last_layer", "kron_lowrank"): ContrastiveKronLowRankLLLaplace,
    ("all", "diag"): ContrastiveDiagLaplace,
    ("all", "full"): ContrastiveFullLaplace,
    ("all", "kron"): ContrastiveKronLaplace,
}


def check_options(
    memory_factor: object, n_samples: object, n_data: object, subset_of_weights: str, hessian_structure: str
) -> None:
    """Check the options of the posterior and of its discounted sum.

    Raises:
        InputTypeError: ``subset_of_weights`` or ``hessian_structure`` is not a string.
        InputError: An option is unknown or out of range.
        UnsupportedError: The structure has no discounted sum.
    """
    number = isinstance(memory_factor, (int, float)) and not isinstance(memory_factor, bool)
    if not (number and 0 <= memory_factor < 1):  # type: ignore[operator]
        hint = "It is the fraction that a step forgets; hessian_memory_factor=0.999 of the released code is 0.001 here."
        raise InputError(expected("memory_factor", "a number in [0, 1)", memory_factor, hint))
    for name, value, least in (("n_samples", n_samples, 1), ("n_data", n_data, 2)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(expected(name, f"a whole number of at least {least}", value))
    wanted = "'last_layer' or 'all', and 'diag', 'full' or 'kron' (or 'last_layer' and 'kron_lowrank')"
    names = "subset_of_weights, hessian_structure"
    if not (isinstance(subset_of_weights, str) and isinstance(hessian_structure, str)):
        received = f"a {type(subset_of_weights).__name__}, a {type(hessian_structure).__name__}"
        raise InputTypeError(expected(names, wanted, received))
    if (subset_of_weights, hessian_structure) in CLASSES:
        return
    if subset_of_weights == "subnetwork" or hessian_structure in ("lowrank", "gp"):
        msg = (
            f"subset_of_weights={subset_of_weights!r}, hessian_structure={hessian_structure!r}: curvatures of batches "
            "cannot be added up in this form. Use 'last_layer' or 'all' with 'diag', 'full' or 'kron'; after "
            "training, Laplace(online.encoder, likelihood='contrastive', ...) fits any structure post hoc."
        )
        raise UnsupportedError(msg)
    raise InputError(expected(names, wanted, f"{subset_of_weights!r}, {hessian_structure!r}"))


def check_numbers(**given: object) -> None:
    """Check that every argument is ``None`` or a positive, finite number.

    Raises:
        InputError: An argument is anything else.
    """
    for name, value in given.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < math.inf):  # type: ignore[operator]
            received = f"a {type(value).__name__}" if isinstance(value, Tensor) else value
            hint = "Other priors can be set on the object that laplace() returns."
            raise InputError(expected(name, "a positive number, or None", received, hint))


def check_probe(probe: object) -> None:
    """Check that the probe is a batch of two inputs or more.

    Raises:
        InputTypeError: The probe is neither a tensor nor a mapping.
        InputError: The probe has fewer than two inputs.
    """
    wanted = "a batch of two inputs or more, a tensor or a mapping of tensors"
    if not isinstance(probe, (Tensor, Mapping)):
        raise InputTypeError(expected("probe", wanted, f"a {type(probe).__name__}"))
    if input_length(probe) < 2:
        raise InputError(expected("probe", wanted, f"{input_length(probe)} of them"))


def describe_callable(function: object) -> str:
    """Describe a loss, a miner or a relation in one line, to recognise it in a saved state.

    A function is described by its name. Another object is described by its type and by those constructor arguments that
    it stores under the same name. Global variables and closures of a function are not part of the description.

    Args:
        function: The callable, or ``None``.

    Returns:
        The description, one line.
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
    """Format options as text, one line each.

    Args:
        options: Strings and numbers by name.

    Returns:
        Lines ``name=value``, sorted by name.
    """
    return "\n".join(f"{name}={value!s}" for name, value in sorted(options.items()))
