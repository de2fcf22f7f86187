"""Which weights go with which structure; checked before laplace-torch looks for a class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected

__all__ = ["check_combination"]

_STRUCTURES = {
    "last_layer": ("kron_lowrank", "diag", "kron", "full", "gp"),
    "all": ("diag", "kron", "full", "lowrank", "gp"),
    "subnetwork": ("diag", "full"),
}

_KNOWN = ("diag", "kron", "kron_lowrank", "full", "lowrank", "gp")

_DEFAULT = {"last_layer": "kron_lowrank"}

_NAMES = ("model", "likelihood", "subset_of_weights", "hessian_structure")


def check_combination(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, str]:
    """Check the arguments of ``laplace.Laplace(..., likelihood="contrastive")``.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        Weights and structure, with the defaults: the last layer, whose default is ``"kron_lowrank"``, and ``"kron"``
        for other weights.

    Raises:
        InputTypeError: The model is missing, or an argument is given twice.
        InputError: Weights, structure or approximation are unknown.
        UnsupportedError: All are known, but there is no such combination.
    """
    given = dict(zip(_NAMES, args, strict=False))
    twice = [name for name in given if name in kwargs]
    if twice:
        raise InputTypeError(expected("Laplace", "every argument once", f"{twice[0]} twice"))
    given |= kwargs
    if "model" not in given:
        raise InputTypeError(expected("model", "an encoder, a torch.nn.Module", "nothing"))
    weights = _one_of("subset_of_weights", given.get("subset_of_weights", "last_layer"), tuple(_STRUCTURES))
    structure = _one_of("hessian_structure", given.get("hessian_structure", _DEFAULT.get(weights, "kron")), _KNOWN)
    approximation = _one_of(
        "functional_approximation",
        given.get("functional_approximation", "sod"),
        ("sod", "nystrom", "variational"),
    )
    if structure not in _STRUCTURES[weights]:
        room = " or ".join(repr(name) for name in _STRUCTURES[weights])
        msg = f"hessian_structure={structure!r}: subset_of_weights={weights!r} has no such structure. Use {room}."
        raise UnsupportedError(msg)
    if approximation != "sod" and structure != "gp":
        hint = "It is for hessian_structure='gp'; leave it out."
        raise InputError(expected("functional_approximation", "nothing for this structure", approximation, hint))
    if approximation != "sod" and weights != "all":
        msg = (
            f"functional_approximation={approximation!r}: with likelihood='contrastive' only 'sod' is there. Leave it "
            "out, and say how many points with n_subset=..."
        )
        raise UnsupportedError(msg)
    return weights, structure


def _one_of(argument: str, value: object, known: tuple[str, ...]) -> str:
    # laplace-torch's own enumerations are strings, and compare equal to their values.
    for name in known:
        if isinstance(value, str) and value == name:
            return name
    shown = repr(value) if isinstance(value, (str, int, float)) or value is None else f"a {type(value).__name__}"
    raise InputError(expected(argument, f"one of {', '.join(repr(name) for name in known)}", shown))
