"""What is refused before a contrastive Laplace object exists."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from contrastive_curvature.backends.base import ContrastiveBackend
from contrastive_curvature.backends.checks import check_backend_options
from contrastive_curvature.errors import InputError, InputTypeError, UnsupportedError, expected
from contrastive_curvature.ggn.sharing import check_kfac_approx, refuse_dataset_sharing
from contrastive_curvature.options import CurvatureOptions, KFACApprox, Structure, parse_option

__all__ = ["check_model", "check_options", "known_options"]


def known_options() -> dict[str, Any]:
    """Names and defaults of what ``backend_kwargs`` may hold."""
    parameters = inspect.signature(ContrastiveBackend.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def check_model(model: object) -> None:
    """Refuse what cannot be an encoder.

    Raises:
        InputTypeError: Not a module.
        InputError: Without parameters, or in half precision.
    """
    if not isinstance(model, nn.Module):
        raise InputTypeError(expected("model", "a torch.nn.Module", f"a {type(model).__name__}"))
    parameters = list(model.parameters())
    if not parameters:
        raise InputError(expected("model", "an encoder with parameters", "one without"))
    halves = {p.dtype for p in parameters} & {torch.float16, torch.bfloat16}
    if halves:
        hint = "A curvature sums many small numbers: call model.float() first."
        raise InputError(expected("model", "float32 or float64 parameters", f"{halves.pop()}", hint))


def check_options(
    structure: Structure | None,
    backend: object,
    backend_kwargs: Mapping[str, Any] | None,
    host_kwargs: MutableMapping[str, Any],
) -> dict[str, Any]:
    """Check the options of a contrastive Laplace object.

    Args:
        structure: The Hessian structure; ``None`` for low rank.
        backend: What the user passed as ``backend``.
        backend_kwargs: What the user passed as ``backend_kwargs``.
        host_kwargs: Further arguments for the host's class.

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
    given = dict(backend_kwargs or {})
    known = known_options()
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise InputError(expected("backend_kwargs", f"keys among {sorted(known)}", str(unknown)))
    options = {**known, **given}
    check_backend_options(options["pairs"], options["relation"], options["rank"])
    names = ("distance", "pd_fix", "margin", "negative_weight", "normalization")
    parsed = CurvatureOptions(**{name: options[name] for name in names})
    options.update({name: getattr(parsed, name) for name in names})
    options["kfac_approx"] = parse_option(KFACApprox, "kfac_approx", options["kfac_approx"])
    check_kfac_approx(options["kfac_approx"], parsed.pd_fix, structure)
    if options["pairs"] == "dataset":
        refuse_dataset_sharing(options["kfac_approx"])
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
