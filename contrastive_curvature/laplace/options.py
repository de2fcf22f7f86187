"""What is refused before a contrastive Laplace object exists."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any

from contrastive_curvature.backends.base import ContrastiveBackend
from contrastive_curvature.backends.checks import check_backend_options
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.ggn.sharing import parse_kfac_approx
from contrastive_curvature.options import CurvatureOptions, KFACApprox, Structure

__all__ = ["check_options", "known_options"]


def known_options(backend: type[ContrastiveBackend] = ContrastiveBackend) -> dict[str, Any]:
    """Names and defaults of what ``backend_kwargs`` may hold: keyword-only arguments of a backend and its bases."""
    kinds = [kind for kind in reversed(backend.__mro__) if issubclass(kind, ContrastiveBackend)]
    parameters = [p for kind in kinds for p in inspect.signature(kind.__init__).parameters.values()]
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def check_options(
    structure: Structure | None,
    backend: object,
    backend_kwargs: Mapping[str, Any] | None,
    host_kwargs: MutableMapping[str, Any],
    takes_rank: bool = False,
) -> dict[str, Any]:
    """Check the options of a contrastive Laplace object.

    Args:
        structure: The Hessian structure; ``None`` for those without a curvature in parameter space.
        backend: What the user passed as ``backend``.
        backend_kwargs: What the user passed as ``backend_kwargs``.
        host_kwargs: Further arguments for the host's class.
        takes_rank: Whether the structure is one of low rank.

    Returns:
        All backend options, defaults filled in.

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
    given = dict(backend_kwargs or {})
    known = known_options(backend or ContrastiveBackend)
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise InputError(expected("backend_kwargs", f"keys among {sorted(known)}", str(unknown)))
    if "rank" in given and not takes_rank:
        hint = "It is for hessian_structure='lowrank'; leave it out."
        raise InputError(expected("backend_kwargs: rank", "nothing for this structure", given["rank"], hint))
    options = {**known, **given}
    check_backend_options(options["pairs"], options["relation"], options["rank"])
    names = ("distance", "pd_fix", "margin", "negative_weight", "normalization")
    parsed = CurvatureOptions(**{name: options[name] for name in names})
    options.update({name: getattr(parsed, name) for name in names})
    options["kfac_approx"] = parse_kfac_approx(options["kfac_approx"], parsed.pd_fix, structure, options["pairs"])
    if structure is Structure.KRON and parsed.pd_fix.coupled and options["kfac_approx"] is KFACApprox.EXPAND:
        warnings.warn(
            f"hessian_structure='kron' with pd_fix={str(parsed.pd_fix)!r}: K-FAC-expand leaves the cross terms between "
            "two points out, and so overstates this curvature several times. backend_kwargs=dict(kfac_approx='reduce', "
            "pairs='batch') approximates them; hessian_structure='diag' or 'full' is exact.",
            stacklevel=4,
        )
    if float(host_kwargs.pop("sigma_noise", 1.0)) != 1.0:
        msg = "sigma_noise: embeddings have no observation noise. Use temperature=... to weaken the likelihood."
        raise UnsupportedError(msg)
    if host_kwargs.pop("asdl_fisher_kwargs", None) is not None:
        msg = "asdl_fisher_kwargs: the contrastive backend is not ASDL's. Its options go into backend_kwargs."
        raise UnsupportedError(msg)
    if host_kwargs.pop("feature_reduction", None) is not None:
        msg = "feature_reduction: the last layer of an encoder takes (N, F). Pool inside the encoder."
        raise UnsupportedError(msg)
    return options
