"""The posterior that ``laplace.Laplace`` constructs for ``likelihood="contrastive"``.

At every call, ``laplace.Laplace`` looks up the class for the weights and structure among the classes of
``laplace.laplace._all_subclasses``. :mod:`contrastive_curvature.registration` replaces that function, which then
returns :func:`entry` for a contrastive call, and the classes of laplace-torch for any other. So it does not matter how
``Laplace`` was imported, and results, signatures and errors of laplace-torch do not change.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from contrastive_curvature.errors import InputError, InputTypeError
from contrastive_curvature.laplace.arguments import CONTRASTIVE
from contrastive_curvature.laplace.posterior import ContrastiveLaplace
from contrastive_curvature.laplace.tower_posteriors import TwoTowerLaplace
from contrastive_curvature.network.two_towers import TwoTowers

__all__ = ["entry", "means_contrastive"]

_ORDER = ("model", "likelihood", "subset_of_weights", "hessian_structure")
_BY_PLACE = ("sigma_noise", "prior_precision", "prior_mean", "temperature", "enable_backprop")
_SUBNETWORK = ("subnetwork_indices", *_BY_PLACE[:4])
"""Arguments that may be given by place, in the order of laplace-torch's classes."""


def means_contrastive(likelihood: Any) -> bool:
    """Return whether this is our likelihood, or a misspelling of it."""
    return isinstance(likelihood, str) and bool(
        difflib.get_close_matches(likelihood.lower(), [CONTRASTIVE], cutoff=0.8)
    )


def entry(call: Mapping[str, Any]) -> Any:
    """Return the constructor of the posterior for a call of ``laplace.Laplace``, ``None`` for another likelihood.

    Args:
        call: The arguments of ``laplace.Laplace`` by name.

    Raises:
        InputError: The likelihood is misspelt, or stands in the place of another argument.
    """
    if not any(means_contrastive(call[name]) for name in _ORDER):
        return None
    if call["likelihood"] != CONTRASTIVE:
        got = call["likelihood"] if isinstance(call["likelihood"], str) else f"a {type(call['likelihood']).__name__}"
        raise InputError("likelihood", repr(CONTRASTIVE), got, f"The order is Laplace({', '.join(_ORDER)}).")
    # Members of laplace-torch's enumerations equal their values.
    weights, structure = (getattr(call[name], "value", call[name]) for name in _ORDER[2:])

    def construct(model: Any, likelihood: Any, *args: Any, **kwargs: Any) -> Any:
        by_place = _SUBNETWORK if weights == "subnetwork" else _BY_PLACE
        named = dict(zip(by_place, args, strict=False))
        if len(args) > len(by_place) or set(named) & set(kwargs):
            got = f"{len(args)} of them by place, and {', '.join(kwargs) or 'none'} by name"
            raise InputTypeError("Laplace", f"each argument once, by place {', '.join(by_place)}", got)
        kwargs = {**named, **kwargs}
        if isinstance(model, TwoTowers):
            return TwoTowerLaplace(model, likelihood, weights, structure, **kwargs)
        return _posterior(model, likelihood, weights, structure, **kwargs)

    construct._key = weights, structure  # type: ignore[attr-defined]
    return construct


def _posterior(model: Any, likelihood: str, weights: Any, structure: Any, **arguments: Any) -> Any:
    """Return the posterior of an encoder."""
    if weights == "last_layer" and structure in ("kron", "kron_lowrank"):
        # For many features the input factor has low rank; rank="full" keeps all eigenvectors.
        options = dict(arguments.get("backend_kwargs") or {})
        full = options.get("rank") == "full"
        if full:
            arguments["backend_kwargs"] = {name: value for name, value in options.items() if name != "rank"}
        structure = "kron" if full else "kron_lowrank"
    return ContrastiveLaplace(model, likelihood, weights, structure, **arguments)
