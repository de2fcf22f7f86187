"""The figures of one score: does it find wrong matches, unknown and corrupted inputs, and does rejecting by it help?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrastive_curvature import metrics
from contrastive_curvature.hessian.sphere import normalize

REJECTED = (0.1, 0.2)
"""Shares of the queries or pairs that are rejected where an error over rejection is one number."""


@dataclass(frozen=True)
class Retrieval:
    """Leave-one-out retrieval among the test inputs.

    Args:
        right: Whether the nearest other test input is of the same class, 0 or 1, NaN where no other one is, (M,).
        map_at_1: Share of the right ones, without the NaN.
    """

    right: Tensor
    map_at_1: float


def retrieve(outputs: Tensor, labels: Tensor) -> Retrieval:
    """Find the nearest neighbour of every test input among the others.

    Args:
        outputs: Raw outputs, shape (M, D).
        labels: Classes, shape (M,).

    """
    ranking = metrics.rank_by_labels(metrics.nearest_neighbors(outputs, k=1), labels)
    return Retrieval(metrics.average_precision_at_k(ranking, 1), metrics.map_at_k(ranking, 1))


def match_figures(score: Tensor, right: Tensor) -> dict[str, Any]:
    """Whether a score tells wrong matches from right ones.

    Args:
        score: Larger is less certain, shape (N,).
        right: 0 or 1, or NaN for a query that is left out, shape (N,).

    Returns:
        ``r_auroc``: AUROC of the score for a wrong match, ``None`` where all are wrong or all right; ``ausc``; and
        ``error_at``: the share of wrong matches among those that are kept, after rejecting each of :data:`REJECTED`.
    """
    curve = metrics.sparsification_curve(score, right)
    rows = range(len(curve.removed))
    errors = [1 - float(curve.performance[min(round(share * len(rows)), rows[-1])]) for share in REJECTED]
    good, bad = score[right == 1], score[right == 0]
    return {
        "r_auroc": metrics.auroc(good, bad) if len(good) and len(bad) else None,
        "ausc": metrics.ausc(score, right),
        "error_at": errors,
    }


def unknown_figures(known: Tensor, unknown: Tensor) -> dict[str, float]:
    """AUROC and AUPRC of a score for unknown inputs.

    Args:
        known: Scores of the test inputs, shape (M,).
        unknown: Scores of inputs of another kind, shape (K,).
    """
    return {"auroc": metrics.auroc(known, unknown), "auprc": metrics.auprc(known, unknown)}


def corruption_figures(clean: Tensor, levels: Mapping[int, Tensor]) -> dict[str, Any]:
    """Whether a score grows with the degree of corruption.

    Args:
        clean: Scores of K test inputs, shape (K,).
        levels: Level -> scores of the same inputs, corrupted, shape (K,).

    Returns:
        ``spearman``: Spearman's correlation of level (0 for the clean) and score over all these inputs, 0 where all
        scores are equal; ``auroc``: level -> AUROC of the score for the corrupted among the clean.
    """
    from scipy.stats import spearmanr

    both = {0: clean, **levels}
    score = torch.cat(list(both.values())).double()
    degree = torch.cat([torch.full((len(part),), float(level)) for level, part in both.items()])
    constant = bool((score == score[0]).all())
    return {
        "spearman": 0.0 if constant else float(spearmanr(degree.numpy(), score.numpy()).statistic),
        "auroc": {str(level): metrics.auroc(clean, part) for level, part in sorted(levels.items())},
    }


COMBINED = {"sum": torch.add, "max": torch.maximum}
"""How the scores of the two inputs of a pair become one."""


@dataclass(frozen=True)
class Verified:
    """Decisions by cross-validation: each fold with the threshold that is best on the others.

    Args:
        right: Whether the decision is right, 0 or 1, shape (P,).
        accuracy: Mean over the folds.
        true_accept: True-accept rate at a false-accept rate of 1e-3.
    """

    right: Tensor
    accuracy: float
    true_accept: float


def verify(left: Tensor, right: Tensor, same: Tensor, fold: Tensor) -> Verified:
    """Decide which pairs are of one class.

    Args:
        left: Raw outputs, shape (P, D).
        right: Those of the other half of each pair.
        same: Whether a pair is of one class, shape (P,).
        fold: Of each pair, shape (P,).
    """
    folds = fold.unique().tolist()
    cosine = (normalize(left)[0].double() * normalize(right)[0].double()).sum(1)
    decided = torch.zeros_like(same)
    for one in folds:
        mine = fold == one
        decided[mine] = cosine[mine] >= best_threshold(cosine[~mine], same[~mine])
    correct = (decided == same).double()
    accuracy = float(np.mean([float(correct[fold == one].mean()) for one in folds]))
    from sklearn.metrics import roc_curve

    false, true, _ = roc_curve(same.numpy(), cosine.numpy(), drop_intermediate=False)
    return Verified(correct, accuracy, float(true[false <= 1e-3].max()))


def best_threshold(cosine: Tensor, same: Tensor) -> float:
    """The cosine from which on a pair counts as one class, with the fewest errors; halfway between two values."""
    values, order = cosine.sort()
    truth = same[order].double()
    # Threshold below value i: errors are the `same` below it, and the others from it on.
    below = torch.cat([truth.new_zeros(1), truth.cumsum(0)])
    above = torch.cat([(1 - truth).flip(0).cumsum(0).flip(0), truth.new_zeros(1)])
    errors = below + above
    possible = torch.ones_like(errors, dtype=torch.bool)
    possible[1:-1] = values[1:] > values[:-1]
    at = int(errors.masked_fill(~possible, torch.inf).argmin())
    padded = torch.cat([values[:1] - 1, values, values[-1:] + 1])
    return float((padded[at] + padded[at + 1]) / 2)
