"""The scale of the prior, which the uncertainties of a contrastive encoder depend on more than on anything else."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected

__all__ = ["NOTHING_POSITIVE", "PRIOR_STRUCTURES", "STRENGTH", "PriorMethod", "average_information"]

PRIOR_STRUCTURES = ("scalar", "layerwise", "diag")
"""One prior precision in all, one a parameter tensor, or one a parameter."""

STRENGTH = 0.01
"""The default prior precision over the average information. Measured: ``docs/defaults.md``."""

NOTHING_POSITIVE = (
    "The negative pairs push more than the positive ones pull, as before training. Train the encoder further, or use a "
    "smaller negative_weight or margin (backend_kwargs), or hessian_structure='diag' with pd_fix='positive'."
)
"""Why a clamped curvature is zero, and what to do."""


class PriorMethod(StrEnum):
    """Ways to choose the prior precision."""

    AVERAGE_INFORMATION = "average_information"
    """A hundredth of the information of the data on the average weight, at the temperature that the loss itself
    suggests. The default: closed form, no validation data."""

    UNIT_INFORMATION = "unit_information"
    """The information of one average observation (Kass and Wasserman, 1995), at the present temperature."""

    MARGLIK = "marglik"
    """laplace-torch's own: maximise the Laplace marginal likelihood."""

    GRIDSEARCH = "gridsearch"
    """Minimise a retrieval criterion on validation data over a grid."""


def average_information(diagonal: Tensor, sizes: list[int], structure: str) -> Tensor:
    """Mean diagonal of the curvature: the information of the data on the average weight.

    It is free of the scale of the loss, of the outputs and of the number of data: multiplying the curvature by a number
    multiplies the prior too. Divided by the number of observations it is the unit-information prior.

    Args:
        diagonal: Non-negative diagonal of the fitted curvature, likelihood factor included, shape (P,).
        sizes: Number of entries of every parameter tensor, summing to P.
        structure: ``"scalar"``: one mean over all parameters; ``"layerwise"``: one a parameter tensor; ``"diag"``: half
            the own entry and half the mean, so that no precision is zero.

    Returns:
        Shape (1,), (number of tensors,) or (P,).

    Raises:
        InputError: The structure is unknown, or the curvature is zero everywhere.
    """
    if not bool((diagonal > 0).any()):
        hint = f"{NOTHING_POSITIVE} Or set la.prior_precision by hand."
        raise InputError(expected("curvature", "a positive entry somewhere on its diagonal", "zero everywhere", hint))
    mean = diagonal.mean()
    if structure == "scalar":
        return mean.reshape(1)
    if structure == "layerwise":
        parts = torch.stack([part.mean() for part in diagonal.split(sizes)])
        return torch.where(parts > 0, parts, mean)
    if structure == "diag":
        return (diagonal + mean) / 2
    raise InputError(expected("prior_structure", "'scalar', 'layerwise' or 'diag'", structure))
