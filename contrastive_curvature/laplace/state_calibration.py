"""The calibration of a posterior in its ``state_dict``: what is saved, and the checks of what is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.embedding.known import Reference, Standard, statistic_name
from contrastive_curvature.laplace.calibration import Calibration
from contrastive_curvature.laplace.state_values import check_tensor, kind_of, refuse

__all__ = ["loaded_calibration", "saved_calibration"]

_KEYS = ("statistic", "statistics", "location", "scale", "fingerprint")


def saved_calibration(la: Any) -> dict[str, Any] | None:
    """The calibration as tensors and strings; ``None`` where there is none.

    The sample of training inputs is not saved: a file of a posterior should not hold features of training data.
    """
    calibration: Calibration | None = la._known.calibration
    if calibration is None:
        return None
    reference = calibration.reference
    return {
        "statistic": statistic_name(la.keeps_features)[0],
        "statistics": reference.statistics,
        "location": reference.standard.location,
        "scale": reference.standard.scale,
        "fingerprint": calibration.fingerprint,
    }


def loaded_calibration(la: Any, state: Mapping[str, Any], like: Tensor) -> Calibration | None:
    """Check the calibration of a state.

    Args:
        la: The posterior that the state is loaded into.
        state: What the user passed.
        like: A parameter of the encoder, for the device.

    Returns:
        The calibration; ``None`` where there is none, or, with a warning, one of another statistic.

    Raises:
        InputError: Something in it is malformed.
    """
    saved = state.get("calibration")  # states from before there were calibrations have no such key
    if saved is None:
        return None
    if type(saved) is not dict or set(saved) != set(_KEYS):
        got = f"the keys {sorted(saved, key=str)}" if type(saved) is dict else kind_of(saved)
        refuse("calibration", f"None, or a dictionary of {', '.join(_KEYS)}", got)
    if type(saved["statistic"]) is not str:
        refuse("calibration: statistic", "a name", kind_of(saved["statistic"]))
    name, n_components = statistic_name(la.keeps_features)
    if saved["statistic"] != name:
        msg = (
            f"state_dict['calibration']: it is of another statistic ({saved['statistic']!r}), which another version of "
            "this library used, so it is left out. Call la.calibrate(loader) again."
        )
        warnings.warn(msg, UserWarning, stacklevel=4)
        return None

    def tensor(key: str, length: int | None) -> Tensor:
        return check_tensor(f"calibration: {key}", saved[key], like, (length,), torch.float64)

    statistics = tensor("statistics", None)
    location, scale = tensor("location", n_components), tensor("scale", n_components)
    if not len(statistics) or bool((statistics.diff() < 0).any()):
        refuse("calibration: statistics", "at least one number, ascending", kind_of(statistics))
    if bool((scale <= 0).any()):
        refuse("calibration: scale", "positive numbers", f"a smallest of {float(scale.min()):g}")
    marks = saved["fingerprint"]
    if not isinstance(marks, Tensor) or marks.dtype != torch.float64 or tuple(marks.shape) != (9,):
        refuse("calibration: fingerprint", "a tensor of torch.float64, shape (9,)", kind_of(marks))
    if not bool(marks.isfinite().all()):
        refuse("calibration: fingerprint", "finite numbers", "NaN or infinity")
    return Calibration(Reference(Standard(location, scale), statistics), marks.detach().cpu())
