"""Checks of the constructor's arguments of a contrastive Laplace object."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError
from contrastive_curvature.fit.curvature_options import CurvatureOptions
from contrastive_curvature.laplace.backends.backend import ContrastiveBackend
from contrastive_curvature.options import PDFix
from contrastive_curvature.structures import KronLowRank, Structure

CONTRASTIVE = "contrastive"
"""The likelihood's name in ``laplace.Laplace(model, likelihood="contrastive")``."""


def known_options(backend: type[ContrastiveBackend]) -> dict[str, Any]:
    """Return names and defaults of all ``backend_kwargs``, including those that a backend of the user adds."""
    kinds = [kind for kind in reversed(backend.__mro__) if issubclass(kind, ContrastiveBackend)]
    parameters = [p for kind in kinds for p in inspect.signature(kind.__init__).parameters.values()]
    own = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.name != "options"}
    return {**CurvatureOptions.defaults(), **own}


def given_options(backend_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the user's ``backend_kwargs`` as a dictionary.

    Raises:
        InputTypeError: ``backend_kwargs`` is not a mapping.
    """
    if backend_kwargs is not None and not isinstance(backend_kwargs, Mapping):
        wanted = "a dictionary, as dict(margin=0.5)"
        raise InputTypeError("backend_kwargs", wanted, f"a {type(backend_kwargs).__name__}")
    return dict(backend_kwargs or {})


def class_and_options(backend: Any) -> tuple[Any, dict[str, Any]]:
    """Return a ``backend`` as its class, and the options of an object; a class has none.

    Raises:
        InputTypeError: An option of a user's own backend is no attribute of the object.
    """
    if not isinstance(backend, ContrastiveBackend):
        return backend, {}
    kind = type(backend)
    own = set(known_options(kind)) - set(CurvatureOptions.defaults())
    hidden = sorted(name for name in own if not hasattr(backend, name))
    if hidden:
        hint = "Pass the class, and backend_kwargs."
        raise InputTypeError("backend", "an object whose options are attributes of it", f"no {hidden}", hint)
    return kind, {**backend.options.named(), **{name: getattr(backend, name) for name in own}}


def check_options(
    structure: type[Structure],
    backend: object,
    chosen: Mapping[str, Any],
    host_kwargs: Mapping[str, Any],
    arguments: Sequence[str],
) -> tuple[CurvatureOptions, dict[str, Any]]:
    """Parse the options of a contrastive Laplace object.

    Args:
        structure: Structure of the curvature.
        backend: The class of the user's ``backend``.
        chosen: Its options by name.
        host_kwargs: Other arguments, which laplace-torch's classes may know.
        arguments: Names of the constructor's arguments, for the message.

    Returns:
        The options, and the additional options of a user's own backend.

    Raises:
        InputError: An option is unknown or out of range.
        InputTypeError: ``backend`` is not a contrastive backend, or an argument is unknown.
        UnsupportedError: An argument has no meaning for embeddings.
    """
    if backend is not None and not (isinstance(backend, type) and issubclass(backend, ContrastiveBackend)):
        wanted = "ContrastiveGGN, BackPackContrastiveGGN or StochManContrastiveGGN of contrastive_curvature"
        hint = "Leave it out for ContrastiveGGN. A backend of your own is a subclass of ContrastiveBackend."
        raise InputTypeError("backend", wanted, f"{backend}", hint)
    for name, value in host_kwargs.items():
        if name not in (*_NOT_OF_EMBEDDINGS, "enable_backprop"):
            near = difflib.get_close_matches(name, arguments, 1)
            hint = f"Did you mean {near[0]}?" if near else ""
            if name in known_options(backend or ContrastiveBackend):
                hint = f"It is an option of backend_kwargs: backend_kwargs=dict({name}={value!r})."
            raise InputTypeError("Laplace", f"arguments among {', '.join(arguments)}", f"{name}={value!r}", hint)
        if name in _NOT_OF_EMBEDDINGS and value not in (None, False, 1):
            raise UnsupportedError(f"{name}: {_NOT_OF_EMBEDDINGS[name]}")
    known = known_options(backend or ContrastiveBackend)
    unknown = sorted(set(chosen) - set(known), key=str)
    if unknown:
        raise InputError("backend_kwargs", f"keys among {sorted(known)}", str(unknown))
    if chosen.get("rank") is not None and not issubclass(structure, KronLowRank):
        hint = "It is for hessian_structure='kron_lowrank'; leave it out."
        raise InputError("backend_kwargs: rank", "nothing for this structure", chosen["rank"], hint)
    ours = CurvatureOptions.defaults()
    # A user's own backend may have other defaults.
    changed = {name: value for name, value in known.items() if name in ours and value != ours[name]}
    options = CurvatureOptions.parse({**changed, **{name: chosen[name] for name in chosen if name in ours}})
    options.check_structure(structure)
    if options.loss.coupled and not structure.couples:
        _warn_of_dropped_terms(structure.name, options.loss.pd_fix)
    return options, {name: chosen.get(name, known[name]) for name in known if name not in ours}


_NOT_OF_EMBEDDINGS = {
    "asdl_fisher_kwargs": "the contrastive backend is not ASDL's. Its options go into backend_kwargs.",
    "sigma_noise": "embeddings have no observation noise. Use temperature=... to weaken the likelihood.",
    "damping": "laplace-torch drops it where the prior is added, so it has no effect there.",
    "feature_reduction": "the last layer of an encoder takes (N, F). Pool inside the encoder.",
}


def _warn_of_dropped_terms(name: str, pd_fix: PDFix) -> None:
    loss = "so this is pd_fix='ggn_fixed'" if pd_fix.second_only else "and so overstates this curvature several times"
    msg = (
        f"hessian_structure={name!r} with pd_fix={str(pd_fix)!r}: K-FAC leaves the cross terms between two points out, "
        f"{loss}. hessian_structure='diag' or 'full' is exact."
    )
    warnings.warn(msg, stacklevel=5)
