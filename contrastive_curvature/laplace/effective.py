"""The effective number of parameters of a posterior: how many directions of the weights the data determine.

MacKay (1992), "Bayesian interpolation", section 4: ``gamma = tr(H (H + D)^-1)`` for a curvature ``H`` and a prior
precision ``D``, both at the temperature 1. It lies between 0 and the number of weights, and does not depend on the
temperature. The sums run in float64, and without a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected

__all__ = ["of_dense", "of_eigenpairs", "of_eigenvalues", "share"]


def share(values: Tensor, prior: Tensor) -> Tensor:
    """What eigenvalues contribute, ``h / (h + d)`` in [0, 1], of any shape; zero where both are zero."""
    values, prior = values.detach().double(), prior.detach().double()
    total = values + prior
    return values / torch.where(total > 0, total, 1)


def of_eigenvalues(groups: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The number of a curvature that is diagonal in some basis, in which the prior is a multiple of the identity.

    Args:
        groups: Eigenvalues, not negative, of any shape, with the prior precision of each group.
    """
    return sum(float(share(values, prior).sum()) for values, prior in groups)


def of_dense(curvature: Tensor, prior: Tensor) -> float:
    """The number of a matrix (P, P), with prior precisions (P,).

    Raises:
        InputError: The sum is not positive definite, by rounding.
    """
    prior = prior.detach().double()
    root, failed = torch.linalg.cholesky_ex(curvature.detach().double() + torch.diag(prior))
    if int(failed):
        hint = "Fit the encoder in float64, model.double(), or use hessian_structure='diag'."
        raise InputError(expected("curvature", "a positive semidefinite one", "one that is not, by rounding", hint))
    return float(len(prior) - (prior * torch.cholesky_inverse(root).diagonal()).sum())


def of_eigenpairs(vectors: Tensor, values: Tensor, prior: Tensor) -> float:
    """The number of ``U diag(values) U^T`` with ``U`` (P, R), with prior precisions (P,)."""
    wide = vectors.detach().double() * values.detach().double().sqrt()
    scaled = wide / prior.detach().double().sqrt().unsqueeze(1)
    with torch.autocast(wide.device.type, enabled=False):
        squares = torch.linalg.eigvalsh(scaled.T @ scaled).clamp(min=0)
    return float(share(squares, squares.new_ones(())).sum())
