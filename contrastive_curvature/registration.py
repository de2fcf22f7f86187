"""Registration with laplace-torch and BackPACK when the package is imported, and its undoing.

Two functions of laplace-torch are replaced, and one method is added to BackPACK. Neither package is imported for this:
a package that is not imported yet is changed at the end of its import. Our functions are imported when they are called,
because one of our modules may have started the import of a host.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from types import ModuleType
from typing import Any

__all__ = ["register", "unregister"]


_classes_of_host: Any = None
"""The function of laplace-torch that :func:`_entries` replaces."""

_first_prior_of_host: Any = None
"""The function of laplace-torch that :func:`_first_prior` replaces."""


def register() -> None:
    """Make ``likelihood="contrastive"`` known to laplace-torch, and our losses and ``L2Norm`` to BackPACK.

    It does nothing if they are registered already.
    """
    if _AfterImport not in sys.meta_path:
        sys.meta_path.insert(0, _AfterImport)
    for host, add in _ADD.items():
        if host in sys.modules:
            add()


def unregister() -> None:
    """Restore both hosts; do nothing if nothing is registered."""
    if _AfterImport in sys.meta_path:
        sys.meta_path.remove(_AfterImport)
    host: Any = sys.modules.get("laplace.laplace")
    if host is not None and host._all_subclasses is _entries:
        host._all_subclasses = _classes_of_host
    training: Any = sys.modules.get("laplace.marglik_training")
    if training is not None and training.fix_prior_prec_structure is _first_prior:
        training.fix_prior_prec_structure = _first_prior_of_host
    base: Any = sys.modules.get("backpack.extensions.secondorder.base")
    if base is not None and vars(base.SecondOrderBackpropExtension).get("__call__") is _call:
        del base.SecondOrderBackpropExtension.__call__


def _entries(cls: type) -> Iterable[Any]:
    """Return the classes for ``laplace.Laplace``: ours for a contrastive call, those of laplace-torch for any other."""
    from laplace.laplace import Laplace

    from contrastive_curvature.laplace.registry import entry

    caller = sys._getframe(1)
    # laplace-torch's function calls itself for every subclass.
    ours = entry(caller.f_locals) if caller.f_code is Laplace.__code__ else None
    return _classes_of_host(cls) if ours is None else [ours]


def _first_prior(*args: Any, **kwargs: Any) -> Any:
    """Return the first prior precision of ``laplace.marglik_training``; refuse to train with our likelihood."""
    from contrastive_curvature.errors import UnsupportedError
    from contrastive_curvature.laplace.registry import means_contrastive

    if means_contrastive(sys._getframe(1).f_locals.get("likelihood")):
        raise UnsupportedError(
            "marglik_training: it trains with a cross-entropy or a squared error of its own, and has no place for a "
            "loss of pairs. Train with the loss itself, and step on -la.log_marginal_likelihood(prior_precision) of a "
            "fit after every few epochs."
        )
    return _first_prior_of_host(*args, **kwargs)


def _call(extension: Any, module: Any, g_inp: Any, g_out: Any) -> None:
    """Run a second-order extension of BackPACK on a module, with our rules where the host has none."""
    from contrastive_curvature.hosts.backpack.extension_registry import call

    call(extension, module, g_inp, g_out)


def _add_to_laplace() -> None:
    global _classes_of_host, _first_prior_of_host
    import laplace.laplace as host

    # The package has a function of this name.
    training: Any = sys.modules["laplace.marglik_training"]
    if training.fix_prior_prec_structure is not _first_prior:
        _first_prior_of_host, training.fix_prior_prec_structure = training.fix_prior_prec_structure, _first_prior

    if host._all_subclasses is not _entries:
        _classes_of_host, host._all_subclasses = host._all_subclasses, _entries
    if "contrastive_curvature.laplace" not in sys.modules:
        # Import now, so that the first Laplace(...) does not have to wait.
        import contrastive_curvature.laplace.registry  # noqa: F401


def _add_to_backpack() -> None:
    from backpack.extensions.secondorder.base import SecondOrderBackpropExtension

    # BackPACK accepts rules of other packages only for one extension object at a time (`set_module_extension`), looks
    # them up by exact class, and users create these objects. So `__call__`, which all second-order extensions inherit,
    # gets an override that uses our rules where the host has none.
    SecondOrderBackpropExtension.__call__ = _call


def _why_not_imported(error: ImportError) -> str:
    """Return why laplace-torch cannot be imported with the curvlinops that is installed."""
    theirs, found = version("laplace-torch"), version("curvlinops-for-pytorch")
    return (
        f"laplace-torch {theirs} does not import with curvlinops-for-pytorch {found} ({error.msg}). Install an older "
        "curvlinops-for-pytorch or a newer laplace-torch; what needs no laplace-torch, such as cc.ggn, works as it is."
    )


_ADD: dict[str, Callable[[], None]] = {"laplace": _add_to_laplace, "backpack.extensions": _add_to_backpack}


class _AfterImport:
    """A finder that finds a host as Python does, and registers with the host after its import."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the specification of a host; its loader also registers after the import."""
        if name not in _ADD:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Hide warnings of two packages that laplace-torch imports, because users cannot avoid them. Warning filters
            # of these packages are kept. The name distinguishes this filter from the filter of the other host, which
            # may be imported at the same time.
            warnings.filterwarnings("ignore", rf"`torch\.jit\.script` is (?#{name})", FutureWarning)
            ours = warnings.filters[0]
            try:
                execute(module)
            except ImportError as error:
                if (error.name or "").partition(".")[0] == "curvlinops" in sys.modules:
                    raise ImportError(_why_not_imported(error), name=error.name, path=error.path) from error
                raise
            finally:
                with suppress(ValueError):
                    warnings.filters.remove(ours)  # type: ignore[attr-defined]
            _ADD[name]()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
