"""The posteriors that ``laplace.Laplace`` constructs for ``likelihood="contrastive"``.

At every call, ``laplace.Laplace`` looks up the class for the weights and structure among the classes of
``laplace.laplace._all_subclasses``. :mod:`contrastive_curvature.registration` makes that function return
:func:`entries` instead: each entry constructs our class for this likelihood, and laplace-torch's class for every other
likelihood. So it does not matter how ``Laplace`` was imported, and classes, signatures and errors of laplace-torch do
not change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from contrastive_curvature.errors import InputTypeError
from contrastive_curvature.laplace.options import CONTRASTIVE
from contrastive_curvature.laplace.posterior import ContrastiveLaplace
from contrastive_curvature.laplace.towers import TwoTowerLaplace
from contrastive_curvature.network.two_towers import TwoTowers
from contrastive_curvature.structures import REMOVED_STRUCTURES, STRUCTURES

__all__ = ["entries"]

Key = tuple[str, str]

_KEYS = [
    *((weights, name) for weights in ("last_layer", "all") for name in (*STRUCTURES, *REMOVED_STRUCTURES)),
    *(("subnetwork", name) for name, kind in STRUCTURES.items() if "subnetwork" in kind.weights),
]
"""Weights and structures of our posteriors, and those that :class:`ContrastiveLaplace` refuses by name."""

_BY_PLACE = ("sigma_noise", "prior_precision", "prior_mean", "temperature", "enable_backprop")
_SUBNETWORK = ("subnetwork_indices", *_BY_PLACE[:4])
"""Arguments that may be given by place, in the order of laplace-torch's classes."""


def _posterior(model: Any, likelihood: str, weights: str, structure: str, **arguments: Any) -> Any:
    """Return the posterior of an encoder."""
    if weights == "last_layer" and structure.startswith("kron"):
        # For many features the input factor has low rank; rank="full" keeps all eigenvectors.
        options = dict(arguments.get("backend_kwargs") or {})
        full = options.get("rank") == "full"
        if full:
            arguments["backend_kwargs"] = {name: value for name, value in options.items() if name != "rank"}
        structure = "kron" if full else "kron_lowrank"
    return ContrastiveLaplace(model, likelihood, weights, structure, **arguments)


def entries(hosts_classes: Iterable[Any]) -> list[Any]:
    """Return the entries for ``laplace.Laplace``, which replace these subclasses of ``BaseLaplace``."""
    hosts = {kind._key: kind for kind in hosts_classes if hasattr(kind, "_key")}
    return [*hosts.values(), *(_entry(key, hosts.get(key)) for key in _KEYS)]


def _entry(key: Key, of_host: Any) -> Any:
    """Return a constructor of the posterior with these weights and this structure, for any likelihood."""

    def construct(model: Any, likelihood: Any, *args: Any, **kwargs: Any) -> Any:
        if likelihood != CONTRASTIVE:
            if of_host is None:
                # The message of laplace-torch.
                raise ValueError(f"Unsupported Laplace combination: {key[0]}, {key[1]}.")
            return of_host(model, likelihood, *args, **kwargs)
        by_place = _SUBNETWORK if key[0] == "subnetwork" else _BY_PLACE
        named = dict(zip(by_place, args, strict=False))
        if len(args) > len(by_place) or set(named) & set(kwargs):
            got = f"{len(args)} of them by place, and {', '.join(kwargs) or 'none'} by name"
            raise InputTypeError("Laplace", f"each argument once, by place {', '.join(by_place)}", got)
        kwargs = {**named, **kwargs}
        if isinstance(model, TwoTowers):
            return TwoTowerLaplace(model, likelihood, *key, **kwargs)
        return _posterior(model, likelihood, *key, **kwargs)

    construct._key = key  # type: ignore[attr-defined]
    return construct
