"""What a posterior writes into its ``state_dict``, and how it takes one back; :mod:`.state` has the checks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from contrastive_curvature.laplace.advice import LabelRange
from contrastive_curvature.laplace.backends.base import ContrastiveBackend, ContrastiveGGN
from contrastive_curvature.laplace.state import (
    check_class,
    check_error,
    check_norm,
    check_options_agree,
    check_settings,
    find_backend,
    unchanged_on_error,
)
from contrastive_curvature.laplace.state_calibration import loaded_calibration, saved_calibration
from contrastive_curvature.laplace.state_classes import loaded_classes, saved_classes
from contrastive_curvature.laplace.state_values import has_norms, refuse
from contrastive_curvature.network.encoder import at_least_float32, weight_norms

__all__ = ["load_state", "saved_parts"]


def saved_parts(la: Any) -> dict[str, Any]:
    """What a posterior saves besides the parts of laplace-torch.

    Args:
        la: A fitted posterior.

    Returns:
        Tensors, numbers and strings.
    """
    return {
        "contrastive": la.plain_options(),
        "H_raw": la.H_raw,
        "cost": la.cost,
        "temperature_given": la._temperature_given,
        "backend": type(la.backend).__name__,
        "encoder_norms": weight_norms(la.model),
        "calibration": saved_calibration(la),
        "typical_norm": la.typical_norm,
        "class_centres": saved_classes(la._classes),
        "curvature_error": la.curvature_error,
        "prior_chosen": la._prior_chosen,
    }


def load_state(la: Any, state: dict[str, Any], likelihood: str) -> None:
    """Check a state, and only then assign it; a state that is refused leaves the posterior as it was.

    Args:
        la: The posterior.
        state: What the user passed.
        likelihood: The one that the state must be of.

    Raises:
        InputError: Something in the state is malformed, or belongs to another class, likelihood or options.
    """
    check_class(state, type(la).__name__, likelihood)
    check_options_agree(state, la.plain_options())
    with unchanged_on_error(la):
        la._prepare_to_load(state)
        like = at_least_float32(next(la.model.parameters()).detach())
        check_settings(state, like, la.n_params, la.prior_mean_sizes() or set(), la.prior_sizes() or set())
        kind = find_backend(state["backend"], ContrastiveGGN if la._chooses_backend else la._backend_cls)
        if state["enable_backprop"] and not kind.keeps_graph:
            refuse("enable_backprop", f"False, since {kind.__name__} keeps no graph", True)
        la.form.check(la, state, like)
        check_norm(state)
        check_error(state)
        known, classes = la._known.anew(loaded_calibration(la, state, like)), loaded_classes(state, like)
        _assign(la, state, kind)
        la._known, la._classes, la._labels = known, classes, LabelRange()


def _assign(la: Any, state: Mapping[str, Any], kind: type[ContrastiveBackend]) -> None:
    """Assign what has been checked. laplace-torch's own method is not used: it assigns while it checks."""
    if la._chooses_backend:
        indices = la.backend.subnetwork_indices
        la._backend_cls, la._backend = kind, None
        la.backend.subnetwork_indices = indices
    if la.enable_backprop != state["enable_backprop"]:
        msg = "enable_backprop: the state was saved with another value, which now holds."
        warnings.warn(msg, UserWarning, stacklevel=4)
    for name in ("mean", "loss", "cost", "prior_mean", "prior_precision", "sigma_noise", "n_data", "n_outputs"):
        setattr(la, name, state[name])
    if "typical_norm" not in state:
        msg = (
            "state_dict: an earlier version of this library saved it, without the typical norm of the outputs. The "
            "uncertainty of an embedding is then without the factor of its own norm, and ranks embeddings worse. Call "
            "la.fit(train_loader) again, or set la.typical_norm to the mean norm of the raw outputs of the training "
            "inputs."
        )
        warnings.warn(msg, UserWarning, stacklevel=4)
    # Setting the prior precision has marked it as chosen. The states of the first versions do not say.
    la._prior_chosen = state.get("prior_chosen", True)
    la.typical_norm, la.curvature_error = state.get("typical_norm"), state.get("curvature_error")
    la.temperature, la._temperature_given = state["temperature"], state["temperature_given"]
    la.enable_backprop = state["enable_backprop"]
    la.model.output_size = la.n_outputs
    la.form.load(la, state)
    la._posterior_scale = None
    # Files of the first versions have no norms.
    # The encoder's own weights may be loaded after this, so other ones are no error.
    if "encoder_norms" in state and not has_norms(la.model, state["encoder_norms"]):
        msg = (
            "The encoder has other weights than the one whose posterior is loaded, so predictions will be wrong. "
            "Load the encoder's state_dict first: laplace-torch keeps it apart from the posterior's."
        )
        warnings.warn(msg, UserWarning, stacklevel=4)
