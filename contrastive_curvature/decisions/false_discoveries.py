"""Select unknown inputs among many, with a bound on the share of known inputs among the selected ones."""

from __future__ import annotations

import math
import warnings
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contrastive_curvature import validate
from contrastive_curvature.errors import InputError, InputTypeError

_ROUNDING = 1e-9
"""Relative error of p-values, which are quotients of whole numbers."""

_Array = TypeVar("_Array", NDArray[np.floating], Tensor)


def select_unknown(p_values: _Array, fdr: float = 0.1) -> _Array:
    """Select unknown inputs among m, so that on average at most a share ``fdr`` of the selected inputs is known.

    In contrast, ``is_known(alpha)`` bounds the share of the *known* inputs that are flagged: if one input in ten is
    unknown, about half of the inputs that it flags at alpha 0.1 are known. This is the Benjamini-Hochberg procedure: it
    selects the k smallest p-values, with the largest k for which the k-th is at most ``k * fdr / m``. A single selected
    input needs a p-value of at most ``fdr / m``, and so ``m / fdr - 1`` calibration inputs.

    Args:
        p_values: Conformal p-values of the m inputs, ``la(x).p_value``, in (0, 1], shape (m,); an array or a tensor.
        fdr: Largest share of known inputs among the selected ones, in (0, 1). The exact bound is ``fdr`` times the
            share of known inputs among the m.

    Returns:
        Booleans, shape (m,), true for selected inputs; an array or a tensor, like the p-values.

    Raises:
        InputTypeError: An argument has another type.
        InputError: A p-value is NaN (an input without an embedding) or not in (0, 1], or ``fdr`` is not in (0, 1).

    Warns:
        UserWarning: No input is selected, because the posterior has too few calibration inputs: an input was further
            out than all calibration inputs.

    Source: Bates, Candès, Lei, Romano and Sesia, Testing for outliers with conformal p-values, 2023, arXiv 2104.08279,
    Theorem 2; Benjamini and Hochberg, 1995.
    """
    share = validate.fraction("fdr", fdr)
    p = np.asarray(p_values.detach().cpu() if isinstance(p_values, Tensor) else p_values)
    if p.ndim != 1 or p.dtype.kind != "f":
        raise InputTypeError("p_values", "floating-point numbers of shape (m,)", f"{p.dtype}, shape {p.shape}")
    if not ((p > 0) & (p <= 1)).all():
        hint = "An input without an embedding (NaN) has none: leave it out."
        raise InputError("p_values", "numbers in (0, 1]", "others, or NaN", hint)
    from scipy.stats import false_discovery_control

    selected = np.zeros(len(p), dtype=bool)
    if len(p):
        selected = false_discovery_control(p.astype(np.float64)) <= share * (1 + _ROUNDING)
        if not selected.any():
            _say_if_too_few(p, share)
    return torch.from_numpy(selected).to(p_values.device) if isinstance(p_values, Tensor) else selected


def _say_if_too_few(p: NDArray[np.floating], fdr: float) -> None:
    """Warn if the smallest p-value is ``1 / (n + 1)``, which holds if all others are its multiples."""
    steps = p / p.min()
    if (np.abs(steps - steps.round()) < 1e-4 * steps).all():
        n, needed = round(1 / float(p.min())) - 1, math.ceil(len(p) / fdr - 1 - _ROUNDING)
        msg = (
            f"select_unknown: nothing is selected. The smallest p-value is that of {n:,} calibration inputs; to select "
            f"one of {len(p):,} inputs at fdr={fdr:g} takes {needed:,}, or fewer inputs at once."
        )
        warnings.warn(msg, UserWarning, stacklevel=3)
