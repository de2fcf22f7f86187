"""``likelihood="contrastive"`` in laplace-torch: registered at import, idempotent, undone by :func:`unregister`.

``laplace.Laplace`` looks a class up and calls it with the likelihood's name. Its eleven concrete classes get an
``__init__`` that hands an object over to its contrastive counterpart when asked for that likelihood, and is the
original otherwise. So ``Laplace(...)`` works however it was imported, a class called directly works too, and nothing
else changes.

``laplace.Laplace`` itself is replaced by a function that looks at the combination first when the likelihood is
contrastive, because laplace-torch refuses an unknown one before it asks any class. ``laplace.marglik_training`` is
replaced by one that refuses this likelihood. A name that was imported before keeps laplace-torch's own error: a
``ValueError`` from the first, an ``UnboundLocalError`` before the first step of training from the second.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import laplace
from laplace.baselaplace import (
    ELLA,
    BaseLaplace,
    DiagLaplace,
    FullLaplace,
    FunctionalLaplace,
    KronLaplace,
    LowRankLaplace,
    VaLLA,
)
from laplace.lllaplace import DiagLLLaplace, FullLLLaplace, FunctionalLLLaplace, KronLLLaplace
from laplace.subnetlaplace import DiagSubnetLaplace, FullSubnetLaplace

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.laplace import classes, functional
from contrastive_curvature.laplace.base import ContrastiveLaplace
from contrastive_curvature.laplace.combination import check_combination
from contrastive_curvature.laplace.options import CONTRASTIVE

__all__ = ["register", "unregister"]

_COUNTERPARTS: dict[type[BaseLaplace], type[ContrastiveLaplace] | None] = {
    DiagLaplace: classes.ContrastiveDiagLaplace,
    FullLaplace: classes.ContrastiveFullLaplace,
    KronLaplace: classes.ContrastiveKronLaplace,
    LowRankLaplace: classes.ContrastiveLowRankLaplace,
    DiagLLLaplace: classes.ContrastiveDiagLLLaplace,
    FullLLLaplace: classes.ContrastiveFullLLLaplace,
    KronLLLaplace: classes.ContrastiveKronLLLaplace,
    DiagSubnetLaplace: classes.ContrastiveDiagSubnetLaplace,
    FullSubnetLaplace: classes.ContrastiveFullSubnetLaplace,
    FunctionalLaplace: functional.ContrastiveFunctionalLaplace,
    FunctionalLLLaplace: functional.ContrastiveFunctionalLLLaplace,
    ELLA: None,
    VaLLA: None,
}

_undo: list[Callable[[], None]] = []


def register() -> None:
    """Make ``likelihood="contrastive"`` known to laplace-torch; does nothing when it already is."""
    if _undo:
        return
    for host, counterpart in _COUNTERPARTS.items():
        _undo.append(_redirect(host, counterpart))
    _undo.append(_guard_marglik_training())
    _undo.append(_guard_lookup())


def unregister() -> None:
    """Put laplace-torch back as it was; does nothing when nothing is registered."""
    while _undo:
        _undo.pop()()


def _redirect(host: type[BaseLaplace], counterpart: type[ContrastiveLaplace] | None) -> Callable[[], None]:
    own = host.__dict__.get("__init__")

    @functools.wraps(host.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        likelihood = kwargs.get("likelihood", args[1] if len(args) > 1 else None)
        if likelihood == CONTRASTIVE and not isinstance(self, ContrastiveLaplace):
            if counterpart is None:
                raise UnsupportedError(_no_approximate_kernel(host))
            if type(self) is not host:
                msg = (
                    f"{type(self).__name__} extends {host.__name__}, which knows no contrastive likelihood. Extend "
                    f"contrastive_curvature.laplace.{counterpart.__name__} instead."
                )
                raise UnsupportedError(msg)
            self.__class__ = counterpart
            self.__init__(*args, **kwargs)
            return
        if own is not None:
            own(self, *args, **kwargs)
        else:
            super(host, self).__init__(*args, **kwargs)

    host.__init__ = __init__

    def undo() -> None:
        if own is not None:
            host.__init__ = own
        else:
            del host.__init__

    return undo


def _guard_lookup() -> Callable[[], None]:
    """Put a function that checks the combination in the place of ``laplace.Laplace``."""
    real: Any = laplace.Laplace

    @functools.wraps(real)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("likelihood", args[1] if len(args) > 1 else None) == CONTRASTIVE:
            check_combination(args, kwargs)
        return real(*args, **kwargs)

    return _replace("Laplace", guarded)


def _guard_marglik_training() -> Callable[[], None]:
    """Put a function that refuses pair losses in the place of ``laplace.marglik_training``."""
    real: Any = laplace.marglik_training

    @functools.wraps(real)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("likelihood", args[2] if len(args) > 2 else None) == CONTRASTIVE:
            msg = (
                "marglik_training trains with the loss of a point, and has none for pairs. Train the encoder with "
                "contrastive_curvature.ContrastiveLoss, then Laplace(...).fit(loader) and "
                "optimize_prior_precision(method='marglik')."
            )
            raise UnsupportedError(msg)
        return real(*args, **kwargs)

    return _replace("marglik_training", guarded)


def _replace(name: str, function: Any) -> Callable[[], None]:
    """Put a function in the place of laplace-torch's, in the package and in the module that defines it."""
    places: tuple[Any, ...] = (laplace, sys.modules[f"laplace.{name.lower()}"])
    real = getattr(laplace, name)
    for place in places:
        setattr(place, name, function)

    def undo() -> None:
        for place in places:
            setattr(place, name, real)

    return undo


def _no_approximate_kernel(host: type) -> str:
    return (
        f"functional_approximation of {host.__name__} with likelihood='contrastive': laplace-torch builds it from the "
        "likelihood of single points, and a pair loss has none. Use functional_approximation='sod' (the default) with "
        "n_subset=..., or hessian_structure='diag', 'kron' or 'full'."
    )
