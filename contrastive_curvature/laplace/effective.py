"""The effective number of parameters of a posterior: how many directions of the weights the data determine."""

from __future__ import annotations

import math
from typing import Any

import torch

from contrastive_curvature.errors import InputError, expected

__all__ = ["effective_parameters"]


def effective_parameters(la: Any) -> float:
    """Effective number of parameters ``tr(H (H + D)^-1)`` at the present prior precision ``D`` and temperature.

    It lies between 0 and the number of weights that have a posterior. Every structure has a log determinant that is
    differentiable in the prior: the number is its slope, ``-d log(det(H + D) / det D) / d log s`` for a prior ``s D``
    at ``s = 1``, so no structure needs a formula of its own.

    Args:
        la: A fitted posterior; it is as before afterwards.

    Returns:
        The number, not rounded.

    Raises:
        InputError: The posterior precision is not positive definite, by rounding.

    Source: MacKay (1992), "Bayesian interpolation", section 4 (the number of well-determined parameters).
    """
    before = la.prior_precision
    scale = torch.ones((), dtype=before.dtype, device=before.device, requires_grad=True)
    try:
        with torch.enable_grad():
            la.prior_precision = before * scale
            (slope,) = torch.autograd.grad(la.log_det_ratio, scale)
    finally:
        la.prior_precision = before
    if not math.isfinite(slope):
        hint = "Fit the encoder in float64, model.double(), or use hessian_structure='diag'."
        raise InputError(expected("curvature", "a positive semidefinite one", "one that is not, by rounding", hint))
    # A difference of sums over all weights: rounding can take it past either end.
    return min(max(-float(slope), 0.0), float(la._n_weights()))
