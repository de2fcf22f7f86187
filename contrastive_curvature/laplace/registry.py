"""``likelihood="contrastive"`` in laplace-torch: registered at import, idempotent, undone by :func:`unregister`.

``laplace.Laplace`` looks a class up and calls it with the likelihood's name. Its eleven concrete classes get an
``__init__`` that hands an object over to its contrastive counterpart when asked for that likelihood, and is the
original otherwise. So ``Laplace(...)`` works however it was imported, a class called directly works too, and nothing
else changes.

``laplace.Laplace`` looks at the combination first when the likelihood is contrastive, because laplace-torch knows
neither all structures nor the default, and ``laplace.marglik_training`` refuses this likelihood. Both functions stay
the objects that they are, with their signatures, and get other code, so that a name that was imported before works too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
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
from contrastive_curvature.laplace.kron_lowrank import ContrastiveKronLowRankLLLaplace
from contrastive_curvature.laplace.options import CONTRASTIVE
from contrastive_curvature.laplace.towers import TwoTowerLaplace
from contrastive_curvature.two_towers import TwoTowers

__all__ = ["dispatch_laplace", "dispatch_marglik_training", "register", "unregister"]

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

# Kept on laplace-torch's own functions, where a second copy of this module finds them (importlib.reload, or an import
# after sys.modules was cleared).
_LAPLACE, _MARGLIK_TRAINING = laplace.Laplace, laplace.marglik_training
_UNDO, _ORIGINAL = "_contrastive_curvature_undo", "_contrastive_curvature_original"

_undo: list[Callable[[], None]] = []


def register() -> None:
    """Make ``likelihood="contrastive"`` known to laplace-torch; does nothing when it already is.

    A registration by an earlier copy of this package in the same process is undone first.
    """
    if _undo:
        return
    unregister()
    setattr(_LAPLACE, _UNDO, _undo)
    for host, counterpart in _COUNTERPARTS.items():
        _undo.append(_redirect(host, counterpart))
    _undo.append(_enter_by(_LAPLACE, _laplace))
    _undo.append(_enter_by(_MARGLIK_TRAINING, _marglik_training))


def unregister() -> None:
    """Put laplace-torch back as it was; does nothing when nothing is registered."""
    registered: list[Callable[[], None]] = _LAPLACE.__dict__.get(_UNDO, [])
    while registered:
        registered.pop()()
    _LAPLACE.__dict__.pop(_UNDO, None)


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


def dispatch_laplace(*args: Any, **kwargs: Any) -> Any:
    """What ``laplace.Laplace`` does while this package is registered.

    Raises:
        InputError: The likelihood is contrastive, and an argument is unknown.
        UnsupportedError: The likelihood is contrastive, and there is no such combination of weights and structure.
    """
    if kwargs.get("likelihood", args[1] if len(args) > 1 else None) == CONTRASTIVE:
        if isinstance(kwargs.get("model", args[0] if args else None), TwoTowers):
            return TwoTowerLaplace(*args, **kwargs)
        _, structure = check_combination(args, kwargs)
        if structure == "kron_lowrank":
            chosen = ("subset_of_weights", "hessian_structure", "functional_approximation")
            rest = {name: value for name, value in kwargs.items() if name not in chosen}
            return ContrastiveKronLowRankLLLaplace(*args[:2], *args[4:], **rest)
    return getattr(_LAPLACE, _ORIGINAL)(*args, **kwargs)


def dispatch_marglik_training(*args: Any, **kwargs: Any) -> Any:
    """What ``laplace.marglik_training`` does while this package is registered.

    Raises:
        UnsupportedError: The likelihood is contrastive.
    """
    if kwargs.get("likelihood", args[2] if len(args) > 2 else None) == CONTRASTIVE:
        msg = (
            "marglik_training trains with the loss of a point, and has none for pairs. Train the encoder with "
            "contrastive_curvature.ContrastiveLoss, then Laplace(...).fit(loader) and "
            "optimize_prior_precision(method='marglik')."
        )
        raise UnsupportedError(msg)
    return getattr(_MARGLIK_TRAINING, _ORIGINAL)(*args, **kwargs)


# Their code runs inside laplace-torch's modules, so it imports what it needs.
def _laplace(*args: Any, **kwargs: Any) -> Any:
    from contrastive_curvature.laplace.registry import dispatch_laplace

    return dispatch_laplace(*args, **kwargs)


def _marglik_training(*args: Any, **kwargs: Any) -> Any:
    from contrastive_curvature.laplace.registry import dispatch_marglik_training

    return dispatch_marglik_training(*args, **kwargs)


def _enter_by(function: Any, entry: Any) -> Callable[[], None]:
    """Give a function the code of another, and keep the original as its attribute.

    Args:
        function: Of laplace-torch, without free variables.
        entry: Takes any arguments; without free variables.

    Returns:
        Undoes it.
    """
    code, name = function.__code__, function.__name__
    original = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    setattr(function, _ORIGINAL, original)
    function.__signature__ = inspect.signature(function)
    function.__code__ = entry.__code__.replace(co_name=code.co_name, co_qualname=code.co_qualname)

    def undo() -> None:
        function.__code__ = code
        del function.__signature__
        delattr(function, _ORIGINAL)

    return undo


def _no_approximate_kernel(host: type) -> str:
    return (
        f"functional_approximation of {host.__name__} with likelihood='contrastive': laplace-torch builds it from the "
        "likelihood of single points, and a pair loss has none. Use functional_approximation='sod' (the default) with "
        "n_subset=..., or hessian_structure='diag', 'kron' or 'full'."
    )
