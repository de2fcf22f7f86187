"""Our losses and normalisation made known to BackPACK: idempotent, and undone by :func:`unregister`.

BackPACK keeps a module map in every extension instance and offers no other place to add to, so the constructors of its
second-order extensions add our entries to the map of what they make; they touch nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from backpack.extensions.curvmatprod import GGNMP, HMP, PCHMP
from backpack.extensions.secondorder.diag_ggn import BatchDiagGGN, DiagGGN
from backpack.extensions.secondorder.diag_hessian import BatchDiagHessian, DiagHessian
from backpack.extensions.secondorder.hbp import HBP
from backpack.extensions.secondorder.sqrt_ggn import SqrtGGN

from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hessian.sphere import L2Norm
from contrastive_curvature.hosts.backpack.host_modules import host_modules
from contrastive_curvature.hosts.backpack.subclasses import known_losses

__all__ = ["register", "unregister"]

_HOSTS = (SqrtGGN, DiagGGN, BatchDiagGGN, HBP, GGNMP, HMP, PCHMP, DiagHessian, BatchDiagHessian)
_undo: list[Callable[[], None]] = []


def register() -> None:
    """Let ``backpack.extend(loss)`` of any loss of cosines, and ``L2Norm``, work; does nothing when they already do.

    Extensions made before are not changed.
    """
    if _undo:
        return
    modules = host_modules()
    for host in _HOSTS:
        loss, norm = modules[host.__name__]
        _undo.append(_extend_constructor(host, loss, norm))


def unregister() -> None:
    """Put BackPACK back as it was; does nothing when nothing is registered."""
    while _undo:
        _undo.pop()()


def _extend_constructor(host: Any, loss: Any, norm: Any | None) -> Callable[[], None]:
    original = host.__init__
    active = True

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not active:
            return
        # Asked each time: a user may have written a loss since.
        for kind in known_losses():
            _add(self, kind, loss)
        if norm is not None:
            _add(self, L2Norm, norm)

    host.__init__ = __init__

    def undo() -> None:
        nonlocal active
        active = False
        # Somebody may have wrapped the constructor after us; theirs stays, and ours does nothing any more.
        if host.__init__ is __init__:
            host.__init__ = original

    return undo


def _add(instance: Any, kind: type, extension: Any) -> None:
    try:
        instance.set_module_extension(kind, extension)
    except ValueError as error:
        theirs = type(instance._BackpropExtension__module_extensions[kind])
        msg = (
            f"{type(instance).__name__}: {theirs.__module__}.{theirs.__qualname__} already handles {kind.__name__}, "
            "and is not overwritten. Call contrastive_curvature.hosts.backpack.unregister() to keep it."
        )
        raise UnsupportedError(msg) from error
