"""Checks of a saved posterior before any of it is used: keys, types, shapes, and the range of the numbers.

``torch.load(..., weights_only=True)`` runs no code, but it reads whatever stands in the file. Nothing of an object
changes before everything here has passed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.laplace.backends.base import ContrastiveBackend
from contrastive_curvature.laplace.checks import check_prior_mean, check_prior_precision, check_temperature
from contrastive_curvature.laplace.state_values import check_number_of, check_tensor, check_type, kind_of, refuse

__all__ = [
    "KNOWN_BACKENDS",
    "check_class",
    "check_error",
    "check_norm",
    "check_options_agree",
    "check_settings",
    "find_backend",
    "unchanged_on_error",
]

_KEYS = (
    "mean",
    "H",
    "H_raw",
    "loss",
    "cost",
    "prior_mean",
    "prior_precision",
    "sigma_noise",
    "n_data",
    "n_outputs",
    "likelihood",
    "temperature",
    "temperature_given",
    "enable_backprop",
    "cls_name",
    "contrastive",
    "backend",
)

KNOWN_BACKENDS = (
    "ContrastiveGGN",
    "BackPackContrastiveGGN",
    "CurvlinopsContrastiveGGN",
    "StochManContrastiveGGN",
)


def check_class(state: object, name: str, likelihood: str) -> None:
    """Refuse an argument that is not a state of this class.

    Args:
        state: What the user passed.
        name: Of this class.
        likelihood: The one that the state must be of.

    Raises:
        InputError: Not a dictionary, another likelihood's, a key is missing, or another class's.
    """
    if not isinstance(state, Mapping):
        raise InputError(expected("state_dict", "what la.state_dict() gave", f"a {type(state).__name__}"))
    if "contrastive" not in state:
        raise InputError(expected("state_dict", "one of a contrastive Laplace", "one of another likelihood"))
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise InputError(expected("state_dict", f"the keys {', '.join(_KEYS)}", f"none of {', '.join(missing)}"))
    check_type(state, "cls_name", str, "the name of a class")
    if state["cls_name"] != name:
        hint = "Give this object the same subset_of_weights and hessian_structure."
        refuse("cls_name", name, state["cls_name"], hint)
    check_type(state, "likelihood", str, "a name")
    if state["likelihood"] != likelihood:
        refuse("likelihood", repr(likelihood), repr(state["likelihood"]))


def check_options_agree(state: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a state that was saved with other options.

    Raises:
        InputError: An option differs; the message names those that do.
    """
    was = state["contrastive"]
    if type(was) is not dict:
        refuse("contrastive", "a dictionary of options", f"a {type(was).__name__}")
    missing = object()
    differ = [
        name
        for name in sorted({*now, *was}, key=str)
        # A tensor in place of a number would not compare to one truth.
        if type(was.get(name, missing)) not in (str, int, float, bool, type(None))
        or isinstance(was[name], bool) != isinstance(now.get(name), bool)
        or was[name] != now.get(name, missing)
    ]
    if differ:
        wanted, saved = (", ".join(f"{name}={given.get(name)!r}" for name in differ) for given in (now, was))
        hint = "Give this object the same backend_kwargs."
        raise InputError(expected("state_dict", f"this object's options {wanted}", saved, hint))


def check_norm(state: Mapping[str, Any]) -> None:
    """Refuse a typical norm that cannot be one; states of the first versions have none.

    Raises:
        InputError: Not a positive, finite number.
    """
    try:
        if state.get("typical_norm") is not None:
            validate.number("typical_norm", state["typical_norm"], positive=True)
    except InputError as error:
        msg = f"state_dict: {error}"
        raise InputError(msg) from None


def check_error(state: Mapping[str, Any]) -> None:
    """Refuse a standard error that cannot be one; states without one have none.

    Raises:
        InputError: Not a non-negative, finite number.
    """
    error = state.get("curvature_error")
    if error is not None and not (isinstance(error, float) and 0 <= error < math.inf):
        refuse("curvature_error", "a non-negative number, or None", error)


def check_settings(
    state: Mapping[str, Any], like: Tensor, n_params: int, mean_sizes: set[int], prior_sizes: set[int]
) -> None:
    """Check everything but the curvature.

    Args:
        state: What the user passed; :func:`check_class` has seen it.
        like: A parameter of the encoder, for dtype and device.
        n_params: Number P of parameters.
        mean_sizes: Numbers of prior means that the structure has room for, besides one.
        prior_sizes: Numbers of prior precisions that the structure has room for, besides one.

    Raises:
        InputError: Something is of another type or shape, or not a number that can be right.
    """
    check_tensor("mean", state["mean"], like, (n_params,))
    mean, precision = state["prior_mean"], state["prior_precision"]
    for key, value in (("prior_mean", mean), ("prior_precision", precision), ("sigma_noise", state["sigma_noise"])):
        _check_floats(key, value, like)
    try:
        check_prior_mean(mean, like.dtype, mean_sizes)
        check_prior_precision(precision, like.dtype, prior_sizes)
    except InputError as error:
        msg = f"state_dict: {error}"
        raise InputError(msg) from None
    sigma = state["sigma_noise"]
    if sigma.numel() != 1 or sigma.ndim > 1 or float(sigma) != 1:
        refuse("sigma_noise", "1: embeddings have no observation noise", f"{sigma.tolist()}")
    for key in ("n_data", "n_outputs"):
        check_number_of(state, key)
    for key in ("temperature_given", "enable_backprop"):
        check_type(state, key, bool, "True or False")
    if "prior_chosen" in state:  # the files of the first versions have none
        check_type(state, "prior_chosen", bool, "True or False")
    if type(state["temperature"]) is not float:
        refuse("temperature", "a positive number", kind_of(state["temperature"]))
    try:
        check_temperature(state["temperature"], like.dtype)
    except InputError as error:
        msg = f"state_dict: {error}"
        raise InputError(msg) from None
    _check_scalar("loss", state["loss"])
    _check_scalar("cost", state["cost"])
    if float(state["cost"]) < 0:
        refuse("cost", "a number that is not negative", float(state["cost"]))
    if "encoder_norms" in state:  # the files of the first versions have none
        norms = state["encoder_norms"]
        if not isinstance(norms, Tensor) or norms.dtype != torch.float64 or norms.ndim != 1:
            refuse("encoder_norms", "a tensor of torch.float64, shape (K,)", kind_of(norms))
        if not bool(norms.isfinite().all()) or bool((norms < 0).any()):
            refuse("encoder_norms", "norms of parameters", "a negative number, NaN or infinity")


def find_backend(name: object, own: type[ContrastiveBackend]) -> type[ContrastiveBackend]:
    """The backend of an object that loads a state: its own, whichever the state was saved with, as all are exact.

    Args:
        name: What the state says.
        own: The class that this object has.

    Raises:
        InputError: Nobody knows a backend of that name.
    """
    if type(name) is not str or name not in (*KNOWN_BACKENDS, own.__name__):
        hint = "Where it is a backend of your own, construct this object with backend=... of it."
        refuse("backend", f"one of {', '.join(KNOWN_BACKENDS)}", kind_of(name), hint)
    return own


@contextmanager
def unchanged_on_error(posterior: Any) -> Iterator[None]:
    """Put an object's attributes, and those of the module that it wraps, back when something fails inside ``with``."""
    own, model = dict(posterior.__dict__), posterior.model
    of_model = dict(model.__dict__)
    modules = dict(model._modules)
    try:
        yield
    except BaseException:
        model._modules.clear()
        model._modules.update(modules)
        for thing, attributes in ((model, of_model), (posterior, own)):
            thing.__dict__.clear()
            thing.__dict__.update(attributes)
        raise


def _check_floats(key: str, value: object, like: Tensor) -> None:
    dense = isinstance(value, Tensor) and value.layout == torch.strided
    if not dense or (value.dtype, value.device) != (like.dtype, like.device):  # type: ignore[attr-defined]
        refuse(key, f"a dense tensor of {like.dtype} on {like.device}", kind_of(value))


def _check_scalar(key: str, value: object) -> None:
    number = value.item() if isinstance(value, Tensor) and value.ndim == 0 else value
    try:
        fine = type(number) in (float, int) and math.isfinite(number)  # type: ignore[arg-type]
    except OverflowError:
        fine = False
    if not fine:
        refuse(key, "one finite number", kind_of(value))
