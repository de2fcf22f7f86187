"""How strong the prior is: what decides the uncertainties of a contrastive encoder more than anything else."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected

__all__ = ["PriorMethod", "unit_information"]


class PriorMethod(str, Enum):
    """Ways to choose the prior precision."""

    UNIT_INFORMATION = "unit_information"
    """As strong as one average observation; the default, no tuning and no data needed."""

    MARGLIK = "marglik"
    """laplace-torch's own: maximise the Laplace marginal likelihood."""

    GRIDSEARCH = "gridsearch"
    """Minimise a retrieval criterion on validation data over a grid."""


def unit_information(diagonal: Tensor, n_data: int, sizes: list[int], structure: str) -> Tensor:
    """Unit-information prior: the mean diagonal of the curvature over the number of observations.

    A prior that says as much as one average observation (Kass and Wasserman, 1995). It is free of the scale of the loss:
    multiplying the curvature by a number multiplies the prior too.

    Args:
        diagonal: Non-negative diagonal of the fitted curvature, likelihood factor included, shape (P,).
        n_data: Number N of points it was fitted on.
        sizes: Number of entries of every parameter tensor, summing to P.
        structure: ``"scalar"``: one mean over all parameters; ``"layerwise"``: one a parameter tensor; ``"diag"``: half
            the own entry and half the mean, so that no precision is zero.

    Returns:
        Shape (1,), (number of tensors,) or (P,).

    Raises:
        InputError: The structure is unknown, or the curvature is zero everywhere.
    """
    if not bool((diagonal > 0).any()):
        hint = "The fixed points of the loss have none; set la.prior_precision by hand."
        raise InputError(expected("curvature", "a positive entry somewhere on its diagonal", "zero everywhere", hint))
    mean = diagonal.mean()
    if structure == "scalar":
        return (mean / n_data).reshape(1)
    if structure == "layerwise":
        parts = torch.stack([part.mean() for part in diagonal.split(sizes)])
        return torch.where(parts > 0, parts, mean) / n_data
    if structure == "diag":
        return (diagonal + mean) / (2 * n_data)
    raise InputError(expected("prior_structure", "'scalar', 'layerwise' or 'diag'", structure))
