"""The class centres of a posterior in its ``state_dict``: what is saved, and the checks of what is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature.fit.class_centres import CAP, ClassCentres
from contrastive_curvature.laplace.state_values import check_tensor, kind_of, refuse

__all__ = ["loaded_classes", "saved_classes"]

_KEYS = ("labels", "n", "sums", "typical")


def saved_classes(centres: ClassCentres | None) -> dict[str, Any] | None:
    """The centres as tensors and numbers; ``None`` where there are none."""
    return None if centres is None else {key: getattr(centres, key) for key in _KEYS}


def loaded_classes(state: Mapping[str, Any], like: Tensor) -> ClassCentres | None:
    """Check the class centres of a state.

    Args:
        state: What the user passed; its number of outputs is checked.
        like: A parameter of the encoder, for the device.

    Raises:
        InputError: Something in them is malformed.
    """
    saved = state.get("class_centres")  # states of earlier versions have no such key
    if saved is None:
        return None
    if type(saved) is not dict or set(saved) != set(_KEYS):
        got = f"the keys {sorted(saved, key=str)}" if type(saved) is dict else kind_of(saved)
        refuse("class_centres", f"None, or a dictionary of {', '.join(_KEYS)}", got)
    labels = check_tensor("class_centres: labels", saved["labels"], like, (None,), torch.int64)
    if not len(labels) or bool((labels[1:] <= labels[:-1]).any()):
        refuse("class_centres: labels", "numbers, ascending", kind_of(labels))
    sums = check_tensor("class_centres: sums", saved["sums"], like, (len(labels), state["n_outputs"]), torch.float64)
    typical, n = saved["typical"], saved["n"]
    if type(typical) is not float or not (math.isfinite(typical) and 0 <= typical <= CAP):
        refuse("class_centres: typical", f"a number in [0, {CAP}]", kind_of(typical))
    if type(n) is not int or not 0 < n < 2**63:
        refuse("class_centres: n", "a positive whole number", kind_of(n))
    # Unit vectors of single precision may be longer by its rounding.
    if bool((sums.abs() > (1 + 1e-5) * n).any()):
        refuse("class_centres: sums", f"sums of at most {n:,} unit vectors", f"an entry of {float(sums.abs().max()):g}")
    return ClassCentres(labels, sums, typical, n)
