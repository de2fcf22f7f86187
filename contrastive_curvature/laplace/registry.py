"""``likelihood="contrastive"`` in laplace-torch: registered at import, idempotent, undone by :func:`unregister`.

``laplace.Laplace`` looks a class up and calls it with the likelihood's name. Its eleven concrete classes get an
``__init__`` that hands an object over to its contrastive counterpart when asked for that likelihood, and is the
original otherwise. So ``Laplace(...)`` works however it was imported, a class called directly works too, and nothing
else changes.

``laplace.Laplace`` itself is replaced by a function that looks at the combination first when the likelihood is
contrastive, because the host refuses an unknown one before it asks any class. Who imported the name earlier keeps the
host's own message.
"""

from __future__ import annotations

import functools
import sys
import types
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
from contrastive_curvature.laplace.base import CONTRASTIVE, ContrastiveLaplace
from contrastive_curvature.laplace.combination import check_combination

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
_real_marglik_training: Callable[..., Any] = laplace.marglik_training


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
    places: tuple[Any, ...] = (laplace, sys.modules["laplace.laplace"])
    real: Any = laplace.Laplace

    @functools.wraps(real)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("likelihood", args[1] if len(args) > 1 else None) == CONTRASTIVE:
            check_combination(args, kwargs)
        return real(*args, **kwargs)

    for place in places:
        place.Laplace = guarded

    def undo() -> None:
        for place in places:
            place.Laplace = real

    return undo


def _guard_marglik_training() -> Callable[[], None]:
    """Give the host's function another body: a name imported before ours is the same object, and is guarded too."""
    global _real_marglik_training
    function: Any = laplace.marglik_training
    before = (function.__code__, function.__defaults__, function.__kwdefaults__)
    real: Any = types.FunctionType(before[0], function.__globals__, function.__name__, before[1], function.__closure__)
    real.__kwdefaults__ = before[2]
    _real_marglik_training = real
    function.__code__, function.__defaults__, function.__kwdefaults__ = _guarded_body.__code__, None, None
    function.__wrapped__ = real

    def undo() -> None:
        function.__code__, function.__defaults__, function.__kwdefaults__ = before
        del function.__wrapped__

    return undo


def _guarded_body(*args: Any, **kwargs: Any) -> Any:
    # Runs with the host's globals, so it must find its way back.
    from contrastive_curvature.laplace.registry import call_marglik_training

    return call_marglik_training(*args, **kwargs)


def call_marglik_training(*args: Any, **kwargs: Any) -> Any:
    """laplace-torch's ``marglik_training``, refused for embeddings.

    Raises:
        UnsupportedError: With ``likelihood="contrastive"``.
    """
    if kwargs.get("likelihood", args[2] if len(args) > 2 else None) == CONTRASTIVE:
        msg = (
            "marglik_training trains with the loss of a point, and has none for pairs. Train the encoder with "
            "contrastive_curvature.ContrastiveLoss, then Laplace(...).fit(loader) and "
            "optimize_prior_precision(method='marglik')."
        )
        raise UnsupportedError(msg)
    return _real_marglik_training(*args, **kwargs)


def _no_approximate_kernel(host: type) -> str:
    return (
        f"functional_approximation of {host.__name__} with likelihood='contrastive': the host builds it from the "
        "likelihood of single points, and a pair loss has none. Use functional_approximation='sod' (the default) with "
        "n_subset=..., or hessian_structure='diag', 'kron' or 'full'."
    )
