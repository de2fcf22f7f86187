"""Checks of the constructor's arguments of a contrastive Laplace object."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.fit.options import CurvatureOptions
from contrastive_curvature.laplace.backends.base import ContrastiveBackend
from contrastive_curvature.laplace.checks import check_sigma_noise
from contrastive_curvature.options import KFACApprox, PDFix, Structure

__all__ = [
    "CONTRASTIVE",
    "arguments_by_name",
    "check_options",
    "given_options",
    "known_options",
]

CONTRASTIVE = "contrastive"
"""The likelihood's name in ``laplace.Laplace(model, likelihood="contrastive")``."""


def arguments_by_name(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a constructor that follow model and likelihood, under their names in laplace-torch's class.

    Args:
        cls: The contrastive class.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        Names and values.

    Raises:
        InputTypeError: There are too many, one is given twice, or one is unknown.
    """
    host: Any = next(c for c in cls.__mro__ if c.__module__.startswith("laplace."))
    names = list(inspect.signature(host.__init__).parameters)[3:]
    if len(args) > len(names):
        raise InputTypeError(expected(cls.__name__, f"at most {len(names)} further arguments", len(args)))
    given = dict(zip(names, args, strict=False))
    twice = sorted(set(given) & set(kwargs))
    if twice:
        raise InputTypeError(expected(cls.__name__, "every argument once", f"{twice[0]} twice"))
    unknown = sorted(set(kwargs) - set(names))
    if unknown:
        raise InputTypeError(expected(cls.__name__, f"arguments among {sorted(names)}", f"{unknown}"))
    return given | dict(kwargs)


def known_options(backend: type[ContrastiveBackend] = ContrastiveBackend) -> dict[str, Any]:
    """Return names and defaults of what ``backend_kwargs`` may hold: with those that a backend of the user's adds."""
    kinds = [kind for kind in reversed(backend.__mro__) if issubclass(kind, ContrastiveBackend)]
    parameters = [p for kind in kinds for p in inspect.signature(kind.__init__).parameters.values()]
    own = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name != "options"}
    return {**CurvatureOptions.defaults(), **own}


def given_options(backend_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the user passed as ``backend_kwargs``, as a dictionary.

    Raises:
        InputTypeError: It is no mapping.
    """
    if backend_kwargs is not None and not isinstance(backend_kwargs, Mapping):
        wanted = "a dictionary, as dict(margin=0.5)"
        raise InputTypeError(expected("backend_kwargs", wanted, f"a {type(backend_kwargs).__name__}"))
    return dict(backend_kwargs or {})


def check_options(
    structure: Structure | None,
    backend: object,
    backend_kwargs: Mapping[str, Any] | None,
    host_kwargs: MutableMapping[str, Any],
    takes_rank: bool = False,
) -> tuple[CurvatureOptions, dict[str, Any]]:
    """Parse the options of a contrastive Laplace object.

    Args:
        structure: The Hessian structure; ``None`` for those without a curvature in parameter space.
        backend: What the user passed as ``backend``.
        backend_kwargs: What the user passed as ``backend_kwargs``.
        host_kwargs: Further arguments for laplace-torch's class.
        takes_rank: Whether the structure is one of low rank.

    Returns:
        The options, and those that a backend of the user's own adds.

    Raises:
        InputError: An option is unknown or out of range.
        InputTypeError: ``backend`` is no contrastive backend.
        UnsupportedError: Something that embeddings do not have.
    """
    if backend is not None and not (isinstance(backend, type) and issubclass(backend, ContrastiveBackend)):
        hint = "Leave it out to use contrastive_curvature.ContrastiveGGN."
        raise InputTypeError(expected("backend", "a contrastive backend", f"{backend}", hint))
    if backend is not None and host_kwargs.get("enable_backprop") and not backend.keeps_graph:
        msg = f"enable_backprop=True: {backend.__name__} keeps no graph. Use backend=ContrastiveGGN, or leave it out."
        raise UnsupportedError(msg)
    given = given_options(backend_kwargs)
    known = known_options(backend or ContrastiveBackend)
    unknown = sorted(set(given) - set(known), key=str)
    if unknown:
        raise InputError(expected("backend_kwargs", f"keys among {sorted(known)}", str(unknown)))
    if "rank" in given and not takes_rank:
        hint = "It is for hessian_structure='lowrank' and 'kron_lowrank'; leave it out."
        raise InputError(expected("backend_kwargs: rank", "nothing for this structure", given["rank"], hint))
    if takes_rank and structure is not Structure.KRON and "rank" in given and given["rank"] is None:
        raise InputError(expected("backend_kwargs: rank", "a positive whole number", None, "Leave it out for 64."))
    ours = CurvatureOptions.defaults()
    # A backend of the user's own may have other defaults.
    changed = {name: value for name, value in known.items() if name in ours and value != ours[name]}
    options = CurvatureOptions.parse({**changed, **{name: given[name] for name in given if name in ours}})
    options.check_structure(structure)
    if structure is Structure.KRON and options.loss.coupled and options.kfac_approx is KFACApprox.EXPAND:
        _warn_of_dropped_terms("kron_lowrank" if takes_rank else "kron", options.loss.pd_fix)
    _drop_foreign(host_kwargs)
    return options, {name: given.get(name, known[name]) for name in known if name not in ours}


def _warn_of_dropped_terms(name: str, pd_fix: PDFix) -> None:
    begin = f"hessian_structure={name!r} with pd_fix={str(pd_fix)!r}: K-FAC-expand leaves the cross terms between two "
    if pd_fix.second_only:
        end = (
            "points out, so this is pd_fix='ggn_fixed'. backend_kwargs=dict(kfac_approx='reduce') approximates them; "
            "hessian_structure='diag' or 'full' is exact."
        )
    else:
        end = (
            "points out, and so overstates this curvature several times. backend_kwargs=dict(kfac_approx='reduce', "
            "pairs='batch') approximates them; hessian_structure='diag' or 'full' is exact."
        )
    warnings.warn(begin + end, stacklevel=5)


def _drop_foreign(host_kwargs: MutableMapping[str, Any]) -> None:
    """Take out of laplace-torch's arguments what embeddings do not have."""
    check_sigma_noise(host_kwargs.pop("sigma_noise", 1.0))
    if host_kwargs.pop("asdl_fisher_kwargs", None) is not None:
        msg = "asdl_fisher_kwargs: the contrastive backend is not ASDL's. Its options go into backend_kwargs."
        raise UnsupportedError(msg)
    if host_kwargs.pop("feature_reduction", None) is not None:
        msg = "feature_reduction: the last layer of an encoder takes (N, F). Pool inside the encoder."
        raise UnsupportedError(msg)
