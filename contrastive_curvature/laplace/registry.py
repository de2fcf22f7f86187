"""The posteriors that ``laplace.Laplace`` constructs for ``likelihood="contrastive"``.

``laplace.Laplace`` looks its classes up at every call, by weights and structure, among those that
``laplace.laplace._all_subclasses`` returns. :mod:`contrastive_curvature.registration` returns :func:`entries` in their
place: each constructs our class for this likelihood, and laplace-torch's own for every other one. So it works however
``Laplace`` was imported, and classes, signatures and errors of laplace-torch stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.laplace import classes, functional
from contrastive_curvature.laplace.kron_lowrank import ContrastiveKronLowRankLLLaplace
from contrastive_curvature.laplace.options import CONTRASTIVE
from contrastive_curvature.laplace.towers import TwoTowerLaplace
from contrastive_curvature.network.two_towers import TwoTowers

__all__ = ["entries"]

Key = tuple[str, str]


def _last_layer_kron(*args: Any, **kwargs: Any) -> Any:
    """Return the posterior whose input factor is of low rank beyond a width; ``rank="full"`` keeps all eigenvectors."""
    options = dict(kwargs.get("backend_kwargs") or {})
    full = options.get("rank") == "full"
    if full:
        del options["rank"]
        kwargs["backend_kwargs"] = options
    # Damping splits the prior between two factors, which both have to be whole.
    kind = classes.ContrastiveKronLLLaplace if full or "damping" in kwargs else ContrastiveKronLowRankLLLaplace
    return kind(*args, **kwargs)


_OURS: dict[Key, Callable[..., Any]] = {
    ("last_layer", "kron"): _last_layer_kron,
    ("last_layer", "kron_lowrank"): _last_layer_kron,
    ("last_layer", "diag"): classes.ContrastiveDiagLLLaplace,
    ("last_layer", "full"): classes.ContrastiveFullLLLaplace,
    ("last_layer", "gp"): functional.ContrastiveFunctionalLLLaplace,
    ("all", "diag"): classes.ContrastiveDiagLaplace,
    ("all", "kron"): classes.ContrastiveKronLaplace,
    ("all", "full"): classes.ContrastiveFullLaplace,
    ("all", "lowrank"): classes.ContrastiveLowRankLaplace,
    ("all", "gp"): functional.ContrastiveFunctionalLaplace,
    ("subnetwork", "diag"): classes.ContrastiveDiagSubnetLaplace,
    ("subnetwork", "full"): classes.ContrastiveFullSubnetLaplace,
}
_NEITHER: tuple[Key, ...] = (("last_layer", "lowrank"), ("all", "kron_lowrank"))


def entries(hosts_classes: Iterable[Any]) -> list[Any]:
    """Return what ``laplace.Laplace`` chooses from, in place of these subclasses of ``BaseLaplace``."""
    hosts = {kind._key: kind for kind in hosts_classes if hasattr(kind, "_key")}
    return [*hosts.values(), *(_entry(key, hosts.get(key)) for key in (*_OURS, *_NEITHER))]


def _entry(key: Key, of_host: Any) -> Any:
    """Return a constructor of the posterior with these weights and this structure, for any likelihood."""

    def construct(model: Any, likelihood: Any, *args: Any, **kwargs: Any) -> Any:
        if likelihood != CONTRASTIVE:
            if of_host is None:
                # laplace-torch's own words.
                msg = f"Unsupported Laplace combination: {key[0]}, {key[1]}."
                raise ValueError(msg)
            return of_host(model, likelihood, *args, **kwargs)
        if key in _NEITHER:
            weights, structure = key
            room = " or ".join(repr(one[1]) for one in _OURS if one[0] == weights)
            msg = f"hessian_structure={structure!r}: subset_of_weights={weights!r} has no such structure. Use {room}."
            raise UnsupportedError(msg)
        if isinstance(model, TwoTowers):
            return TwoTowerLaplace(model, likelihood, *key, *args, **kwargs)
        return _OURS[key](model, likelihood, *args, **kwargs)

    construct._key = key  # type: ignore[attr-defined]
    return construct
