"""Checks of the options of an online Laplace, and the description of options by which a training is recognised."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.laplace.options import given_options
from contrastive_curvature.structures import STRUCTURES


def check_options(
    memory_factor: float, n_samples: object, n_data: int, subset_of_weights: object, hessian_structure: object
) -> None:
    """Check the options of the posterior and of its discounted sum.

    Raises:
        InputError: An option is unknown or out of range.
        UnsupportedError: The structure has no discounted sum.
    """
    if validate.number("memory_factor", memory_factor) >= 1:
        hint = "It is the fraction that a step forgets; hessian_memory_factor=0.999 of the released code is 0.001 here."
        raise InputError("memory_factor", "a number in [0, 1)", memory_factor, hint)
    validate.count("n_samples", n_samples)
    if validate.count("n_data", n_data) < 2:
        raise InputError("n_data", "a whole number of at least 2", n_data)
    adding = {name: kind.weights for name, kind in STRUCTURES.items() if kind.adds}
    if subset_of_weights == "subnetwork" or (
        hessian_structure in ("gp", *STRUCTURES) and hessian_structure not in adding
    ):
        raise UnsupportedError(
            f"subset_of_weights={subset_of_weights!r}, hessian_structure={hessian_structure!r}: curvatures of batches "
            "cannot be added up in this form. Use 'last_layer' or 'all' with 'diag', 'full' or 'kron'; after "
            "training, Laplace(online.encoder, likelihood='contrastive', ...) fits any structure post hoc."
        )
    validate.choice("subset_of_weights", subset_of_weights, ("last_layer", "all"))
    known = tuple(name for name, weights in adding.items() if subset_of_weights in weights)
    validate.choice("hessian_structure", hessian_structure, known)


def batch_options(backend_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of the curvature of a batch, the only pairs and points that a training step sees.

    Raises:
        InputError: An option asks for others.
    """
    options = given_options(backend_kwargs)
    if getattr(options.get("loss"), "compares", "pairs") == "pairs":
        options = {"pairs": "batch", **options}
    later = "A training step sees no others; la.fit(loader) after training takes those of the data set."
    samples = "A step has few points, and an interrupted training could not go on with the same samples."
    for name, only, hint in (("pairs", "batch", later), ("mc_samples", None, samples)):
        if options.get(name) not in (None, only):
            wanted = "nothing in training" if only is None else f"{only!r} or nothing"
            raise InputError(f"backend_kwargs: {name}", wanted, repr(options[name]), hint)
    return options


def described(value: object) -> str:
    """Describe a setting in one line, to recognise it in a saved state.

    A function is described by its name, without global variables and closures. An object or a module is described by
    its type and by those constructor arguments that it stores under the same name.
    """
    # Without addresses in memory, which the next run of a program does not have.
    text = " ".join(re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)).split())
    kind = type(value)
    if kind.__repr__ not in (object.__repr__, nn.Module.__repr__):
        return text
    arguments = {name: getattr(value, name, None) for name in inspect.signature(kind.__init__).parameters}
    stored = {name: found for name, found in arguments.items() if isinstance(found, (str, bool, int, float))}
    return f"{text} with {stored}"
