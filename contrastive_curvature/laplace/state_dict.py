"""The ``state_dict`` of a posterior: the value, the options that made it, and what its encoder was."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from contrastive_curvature.codec import check_seal, sealed, to_tree
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.network.digest import weight_norms
from contrastive_curvature.network.encoder import at_least_float32
from contrastive_curvature.posterior.files import KEYS, entries, kind_of, posterior_of, refuse
from contrastive_curvature.posterior.predict import moved_inputs
from contrastive_curvature.posterior.value import Posterior
from contrastive_curvature.removed import REMOVED

if TYPE_CHECKING:
    from contrastive_curvature.laplace.posterior import ContrastiveLaplace

_KEYS: dict[str, Any] = {
    **KEYS,
    "likelihood": str,
    "enable_backprop": bool,
    "subset_of_weights": str,
    "contrastive": dict,
    "backend": str,
    "encoder_norms": torch.Tensor,
    "checksum": str,
}
"""Keys of a state, and types of their values."""

_OF_LAST_LAYER = ("data", "_last_layer_name")
"""Further keys of the posterior of a last layer."""

SEALED = tuple(key for key in _KEYS if key != "checksum")
"""Entries that the checksum is of: all but ``"data"``, inputs that a user may replace."""

_BACKENDS = ("ContrastiveGGN", "BackPackContrastiveGGN", "StochManContrastiveGGN")


def state_of(la: ContrastiveLaplace) -> dict[str, Any]:
    """Return the state of a posterior, see :meth:`.ContrastiveLaplace.state_dict`."""
    state: dict[str, Any] = to_tree(
        {
            **entries(la.posterior, la.on_last_layer),
            **{name: getattr(la, name) for name in ("likelihood", "enable_backprop", "subset_of_weights")},
            **({"data": la.data, "_last_layer_name": la.last_layer_name} if la.on_last_layer else {}),
            "contrastive": la.plain_options(),
            "backend": type(la.backend).__name__,
            "encoder_norms": weight_norms(la.model),
        }
    )
    return sealed(state, SEALED)


def load_state(la: ContrastiveLaplace, state: Mapping[str, Any]) -> Posterior:
    """Return the posterior of a state, see :meth:`.ContrastiveLaplace.load_state_dict`."""
    _check_state(state, {"subset_of_weights": la.subset_of_weights, "likelihood": la.likelihood}, la.plain_options())
    if la.on_last_layer:
        _find_last_layer(la, state)
    la.renew_backend()
    if state["backend"] not in (*_BACKENDS, type(la.backend).__name__):
        of_yours = "Where it is a backend of your own, construct this object with backend=... of it."
        hint = REMOVED.get(state["backend"], of_yours)
        refuse("backend", f"one of {', '.join(_BACKENDS)}", repr(state["backend"]), hint)
    like = at_least_float32(next(la.model.parameters()).detach())
    posterior = posterior_of(state, la.structure, la.read, like)
    if la.enable_backprop != state["enable_backprop"]:
        msg = "enable_backprop: the state was saved with another value which now holds."
        warnings.warn(msg, UserWarning, stacklevel=3)
    now, saved = weight_norms(la.model), state["encoder_norms"].to(like.device)
    # The tolerance allows another precision. The encoder's weights may be loaded after this, so only warn.
    if saved.shape != now.shape or not torch.allclose(now, saved.to(now), rtol=1e-3, atol=1e-12):
        msg = (
            "The encoder has other weights than the one whose posterior is loaded, so predictions will be wrong. "
            "Load the encoder's state_dict first: laplace-torch keeps it apart from the posterior's."
        )
        warnings.warn(msg, UserWarning, stacklevel=3)
    la.model.output_size = posterior.fitted.dim
    return replace(posterior, prior=la.checked(posterior.prior))


def _find_last_layer(la: ContrastiveLaplace, state: Mapping[str, Any]) -> None:
    """Find the last layer with the made-up inputs of a state, because a state can be checked only then."""
    name = state["_last_layer_name"]
    if name != la.last_layer_name:
        refuse("_last_layer_name", f"{la.last_layer_name!r}, that of this object", kind_of(name))
    if state["data"] is None and la.model.last_layer is not None:
        return
    try:
        la.find_last_layer(moved_inputs(la.model, state["data"], la._device))
    except UnsupportedError:
        raise
    except Exception as error:  # encoders raise any error for inputs of another kind
        reason = (str(error) or type(error).__name__).splitlines()[0]
        hint = "Where these are made up and the encoder needs real ones, set state_dict['data'] = x[:2] of yours."
        refuse("data", "inputs that the encoder takes", f"{kind_of(state['data'])} ({reason})", hint)
    if state["n_outputs"] != la.model.dim:
        refuse("n_outputs", f"{la.model.dim}, that of the encoder", kind_of(state["n_outputs"]))
    la.data = state["data"]


def _check_state(state: object, kind: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Refuse a state of other weights or options, or a malformed state; the numbers are not checked."""
    if not isinstance(state, Mapping):
        raise InputError("state_dict", "what la.state_dict() gave", f"a {type(state).__name__}")
    keys = [*_KEYS, *(_OF_LAST_LAYER if kind["subset_of_weights"] == "last_layer" else ())]
    missing = [key for key in keys if key not in state]
    if missing:
        hint = "States of version 0.2 are not read: fit again."
        raise InputError("state_dict", f"the keys {', '.join(keys)}", f"none of {', '.join(missing)}", hint)
    for key, wanted in _KEYS.items():
        if not isinstance(state[key], wanted) or (wanted is int and isinstance(state[key], bool)):
            refuse(key, f"a value of type {wanted}", kind_of(state[key]))
    for key, value in kind.items():
        if state[key] != value:
            refuse(key, repr(value), repr(state[key]), "Give this object the same arguments.")
    saved = state["contrastive"]
    names = sorted({*options, *saved}, key=str)
    differ = [name for name in names if name not in saved or saved[name] != options.get(name)]
    if differ:
        wanted, got = (", ".join(f"{name}={side.get(name)!r}" for name in differ) for side in (options, saved))
        hint = "Give this object the same backend_kwargs."
        raise InputError("state_dict", f"this object's options {wanted}", got, hint)
    check_seal(state, SEALED)
