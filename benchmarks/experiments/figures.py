"""Figures beside those of :mod:`contrastive_curvature.metrics`: failures, and the released code's definitions.

The released code (https://github.com/FrederikWarburg/bayesian-metric-learning, ``src/evaluate``) departs from the
paper's text in several of its figures; each is here under its name with ``_released``, so that both can be reported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contrastive_curvature import metrics
from contrastive_curvature.metrics import Ranking


def r_auroc(uncertainty: Tensor, precision_at_1: Tensor) -> float | None:
    """AUROC of the uncertainty for telling the queries whose nearest neighbour is wrong.

    Args:
        uncertainty: Of each query, larger is less certain, shape (N,).
        precision_at_1: 1 where the nearest neighbour is right, 0 where it is wrong (the positive class), NaN for
            queries without a positive, which are left out; shape (N,).

    Returns:
        A number in [0, 1], chance 0.5; ``None`` where all are right or all wrong, as there is nothing to tell.
    """
    right, wrong = uncertainty[precision_at_1 == 1], uncertainty[precision_at_1 == 0]
    return metrics.auroc(right, wrong) if len(right) and len(wrong) else None


def map_released(ranking: Ranking, k: int) -> float:
    """Mean average precision over all queries, those without a positive too, as the released code counts them.

    At k = 1 it reports the recall, so that they count as wrong (``recall.py``); above, as right (``map.py``).

    Args:
        ranking: Right and wrong neighbours.
        k: How many neighbours count.

    Returns:
        A number in [0, 1].

    Source: ``src/evaluate/map.py`` and ``recall.py`` of the released code.
    """
    precision = metrics.average_precision_at_k(ranking, k)
    return float(precision.nan_to_num(0.0 if k == 1 else 1.0).mean())


def auprc_released(uncertainty_id: Tensor, uncertainty_ood: Tensor) -> float:
    """Area under the precision-recall curve by the trapezoidal rule, which joins its points by straight lines.

    Args:
        uncertainty_id: In distribution, shape (N,).
        uncertainty_ood: Out of distribution (the positive class), shape (M,).

    Returns:
        A number in (0, 1], usually above the average precision.

    Source: ``src/evaluate/ood.py`` of the released code.
    """
    from sklearn.metrics import auc, precision_recall_curve

    truth = torch.cat([torch.zeros(len(uncertainty_id)), torch.ones(len(uncertainty_ood))])
    scores = torch.cat([uncertainty_id, uncertainty_ood]).double()
    precision, recall, _ = precision_recall_curve(truth.numpy(), scores.numpy())
    return float(auc(recall, precision))


def ausc_released(uncertainty: Tensor, correct: Tensor, neighbor_uncertainty: Tensor) -> float:
    """Area under the sparsification curve with the retrieved neighbour's uncertainty added to the query's.

    Besides: 99 percentiles of the queries are removed instead of one query after the other, the area of the constant 1
    is 98/99, and queries without any positive count as wrong.

    Args:
        uncertainty: Of each query, shape (N,).
        correct: Whether the nearest neighbour is right, shape (N,).
        neighbor_uncertainty: Of each query's nearest neighbour, shape (N,).

    Returns:
        A number in [0, 98/99].

    Source: ``src/evaluate/ausc.py`` of the released code.
    """
    total = uncertainty.double() + neighbor_uncertainty.double()
    order = total.argsort(descending=True, stable=True)
    remaining = correct.double()[order]
    removed = [len(order) * percent // 100 for percent in range(99)]
    curve = torch.stack([remaining[start:].mean() for start in removed])
    return float(torch.trapezoid(curve) / len(curve))


def ece_released(votes: Tensor, labels: Tensor, n_bins: int = 10) -> float | None:
    """Expected calibration error over bins ``[low, high)``, which leave out the points of confidence 1.

    The error is averaged over the points that are in a bin. Votes, mode and confidence are those of
    :func:`contrastive_curvature.metrics.calibration_bins`.

    Args:
        votes: Labels voted for, int64, shape (S, N).
        labels: True labels, int64, shape (N,).
        n_bins: Number of bins of equal width.

    Returns:
        A number in [0, 1], ``None`` where all points have confidence 1.

    Source: ``src/evaluate/ece.py`` of the released code.
    """
    mode = votes.mode(0).values
    agree = (votes == mode).sum(0)
    n_samples = len(votes)
    # In integers, because 0.7 * 10 need not round to 7.
    position = agree * n_bins // n_samples
    kept = position < n_bins
    if not bool(kept.any()):
        return None
    gap = (mode == labels).double() - agree.double() / n_samples
    sums = torch.zeros(n_bins, dtype=torch.float64).index_add_(0, position[kept], gap[kept])
    return float(sums.abs().sum() / kept.sum())
