"""A diagonal of the last layer whose variance is little more than the norm of the features, and its warning.

Features that are not negative and strongly correlated, as pooled activations are, give the sum over independent weights
about the same value as the squared norm: large where the network is sure. ``docs/defaults.md`` has the rank
correlations of the encoders of ``benchmarks.transfer``: 0.93 and more with pooled features.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import linear

from contrastive_curvature.fit.loop import DatasetCurvature
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.laplace.forms import DiagonalForm
from contrastive_curvature.network.last_layer import diag_last_layer_variance

__all__ = ["FeatureNormWarning", "LastLayerDiagonalForm", "norm_correlation"]

_MOST_CORRELATION = 0.93

_FEWEST_POINTS = 100
"""With fewer points a rank correlation is too uncertain."""


class FeatureNormWarning(UserWarning):
    """The variance of a diagonal last-layer posterior says little more than the norm of the features."""


class LastLayerDiagonalForm(DiagonalForm):
    """The diagonal of a last layer; looks at its use for the training points when it is fitted."""

    def look(self, la: Any, result: DatasetCurvature) -> None:
        """Warn where the variance of the training points is little more than the norm of their features."""
        if result.features is None or len(result.features) < _FEWEST_POINTS:
            return
        weight, bias = (*la._posterior_parameters(), None)[:2]
        correlation = norm_correlation(result.features.columns["features"], weight, bias, la.H)
        if correlation > _MOST_CORRELATION:
            msg = (
                f"The variance that hessian_structure='diag' gives the training points has a rank correlation of "
                f"{correlation:.3f} with the norm of their features: the score says little more than that norm, which "
                "is often larger where the encoder is sure. Use the default structure, hessian_structure="
                "'kron_lowrank', which sees correlations between features."
            )
            warnings.warn(msg, FeatureNormWarning, stacklevel=5)


@torch.no_grad()
def norm_correlation(phi: Tensor, weight: Tensor, bias: Tensor | None, diagonal: Tensor) -> float:
    """Rank correlation (Spearman's) of the variance across the mean direction with the norm of the features.

    Args:
        phi: Features, shape (N, F).
        weight: Of the layer, shape (D, F).
        bias: Of the layer, shape (D,), or ``None``.
        diagonal: Clamped diagonal of the curvature, shape (P,). The prior precision is its mean, which makes the result
            free of the scale of the loss and of the temperature.

    Returns:
        From -1 to 1; NaN where one of the two is constant.
    """
    variance = 1 / (diagonal + diagonal.mean())
    u = normalize(linear(phi, weight, bias))[0]
    across = (diag_last_layer_variance(phi, variance, len(weight)) * (1 - u.square())).sum(1)
    with warnings.catch_warnings():
        # Of constant numbers, which SciPy warns of.
        warnings.simplefilter("ignore")
        found = spearmanr(across.double().cpu().numpy(), phi.double().norm(dim=1).cpu().numpy())
    return float(found.statistic)
