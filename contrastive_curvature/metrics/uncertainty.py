"""How well an uncertainty detects out-of-distribution inputs (AUROC, AUPRC) and wrong retrievals (AUSC)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from contrastive_curvature.errors import InputError
from contrastive_curvature.metrics._checks import check_scores, check_tensor


def _out_of_distribution(uncertainty_id: Tensor, uncertainty_ood: Tensor) -> tuple[np.ndarray, np.ndarray]:
    inside = check_scores("uncertainty_id", uncertainty_id).cpu()
    outside = check_scores("uncertainty_ood", uncertainty_ood).cpu()
    target = torch.cat([torch.zeros_like(inside), torch.ones_like(outside)])
    return target.numpy(), torch.cat([inside, outside]).numpy()


def auroc(uncertainty_id: Tensor, uncertainty_ood: Tensor) -> float:
    """Return the area under the ROC curve for detecting out-of-distribution points by their uncertainty.

    This is the probability that an out-of-distribution point has a larger uncertainty than an in-distribution point; a
    tie counts one half. It uses scikit-learn, because torchmetrics applies a sigmoid to scores outside [0, 1], which
    makes large uncertainties equal.

    Args:
        uncertainty_id: Uncertainty (larger is less certain, any unit) of in-distribution points, shape (N,), finite.
        uncertainty_ood: Uncertainty of out-of-distribution points, in the same unit, shape (M,), finite.

    Returns:
        A number in [0, 1]; a random score has 0.5.

    Source: Warburg et al. (2023), appendix G.3.
    """
    from sklearn.metrics import roc_auc_score  # imported at first use, because it takes a second

    return float(roc_auc_score(*_out_of_distribution(uncertainty_id, uncertainty_ood)))


def auprc(uncertainty_id: Tensor, uncertainty_ood: Tensor) -> float:
    """Return the area under the precision-recall curve for detecting out-of-distribution points by their uncertainty.

    Out-of-distribution is the positive class. It uses scikit-learn's ``average_precision_score``, because the
    trapezoidal rule of the authors' released code is too optimistic. A random score has M / (N + M), so compare only
    data of the same sizes.

    Args:
        uncertainty_id: Uncertainty (larger is less certain, any unit) of in-distribution points, shape (N,), finite.
        uncertainty_ood: Uncertainty of out-of-distribution points, in the same unit, shape (M,), finite.

    Returns:
        A number in (0, 1]; larger is better.

    Source: Warburg et al. (2023), appendix G.3.
    """
    from sklearn.metrics import average_precision_score  # imported at first use, because it takes a second

    return float(average_precision_score(*_out_of_distribution(uncertainty_id, uncertainty_ood)))


class SparsificationCurve(NamedTuple):
    """Mean performance of the remaining queries while the most uncertain queries are removed one by one.

    Attributes:
        removed: Fraction of the queries removed, float64, shape (N,): 0, 1/N, ..., (N-1)/N.
        performance: Mean performance of the queries that remain, float64, shape (N,).
    """

    removed: Tensor
    performance: Tensor


def sparsification_curve(uncertainty: Tensor, performance: Tensor) -> SparsificationCurve:
    """Remove queries one by one, the most uncertain first, and record the mean performance of the remaining ones.

    Queries of equal uncertainty count with their mean performance, the expectation over all orders of removal.

    Args:
        uncertainty: Uncertainty of each query (larger is less certain, any unit), shape (N,), finite.
        performance: Performance of each query, shape (N,), for example ``average_precision_at_k(ranking, 1)``. Queries
            with NaN, which have no positive in the gallery, are left out.

    Returns:
        The curve over the queries that were not left out.

    Raises:
        InputError: Every query is left out.

    Source: Warburg et al. (2023), appendix G.3.
    """
    scores = check_scores("uncertainty", uncertainty)
    raw = check_tensor("performance", performance)
    if raw.shape != scores.shape:
        raise InputError("performance", f"shape {tuple(scores.shape)}, one per query", tuple(raw.shape))
    kept = ~torch.isnan(raw).to(scores.device)
    if not bool(kept.any()):
        raise InputError("performance", "a query with a positive", "NaN for all queries")
    values = check_scores("performance", raw.to(scores.device)[kept])
    _, group = torch.unique(scores[kept], return_inverse=True)
    size = torch.bincount(group)
    mean = torch.zeros(len(size), dtype=torch.float64, device=scores.device).index_add_(0, group, values) / size
    certain_first = mean.repeat_interleave(size)
    count = torch.arange(1, len(values) + 1, dtype=torch.float64, device=scores.device)
    remaining = certain_first.cumsum(0) / count
    return SparsificationCurve((count - 1) / len(values), remaining.flip(0))


def ausc(uncertainty: Tensor, performance: Tensor) -> float:
    """Return the area under the sparsification curve.

    It uses the trapezoidal rule over the removed fraction, rescaled to [0, 1] so that a constant performance c has area
    c.

    Args:
        uncertainty: Uncertainty of each query (larger is less certain, any unit), shape (N,), finite.
        performance: Performance of each query, shape (N,); in the paper, the average precision at 1.

    Returns:
        A number between the least and the greatest performance.

    Source: Warburg et al. (2023), appendix G.3 and Table 2; the authors' released code evaluates the
        same curve at 99 percentiles.
    """
    values = sparsification_curve(uncertainty, performance).performance
    if len(values) == 1:
        return float(values[0])
    return float(torch.trapezoid(values) / (len(values) - 1))
