"""A factor on learned variances with which the votes of samples are good probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from contrastive_curvature import metrics
from contrastive_curvature.metrics.neighbors import Metric

__all__ = ["TEMPERATURES", "calibrated_temperature"]

TEMPERATURES = tuple(2.0**-k for k in range(-2, 11))
"""Those that are tried: 4 to 1/1024."""


def calibrated_temperature(
    draw: Callable[[float], Iterable[Tensor]], labels: Tensor, metric: Metric
) -> tuple[float, dict[float, float]]:
    """Choose the temperature whose votes have the smallest Brier score.

    That is a proper score. The calibration error is not: it is small, too, where so much noise is added that all votes
    are chance.

    Args:
        draw: From a temperature, samples of the embeddings of N images, each (N, D).
        labels: Of the images, shape (N,).
        metric: How samples are compared.

    Returns:
        One of :data:`TEMPERATURES`, the largest of equal ones; and the scores of all.
    """
    scores = {
        temperature: metrics.retrieval_brier(draw(temperature), labels, metric=metric) for temperature in TEMPERATURES
    }
    return min(scores, key=lambda temperature: (scores[temperature], -temperature)), scores
