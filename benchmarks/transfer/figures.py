"""The figures of one score: does it find wrong matches, unknown inputs and harm, and does rejecting by it help?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature import metrics
from contrastive_curvature.errors import InputError, expected

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

    Raises:
        InputError: No class has two test inputs.
    """
    sizes = labels.unique(return_counts=True)[1]
    if int(sizes.max()) < 2:
        hint = "Retrieval is judged by finding another test input of the same class."
        raise InputError(expected("test_labels", "a class with at least 2 inputs", "one input of every class", hint))
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


def harm_figures(unharmed: Tensor, levels: Mapping[int, Tensor]) -> dict[str, Any]:
    """Whether a score grows with the degree of harm.

    Args:
        unharmed: Scores of K test inputs, shape (K,).
        levels: Level -> scores of the same inputs, harmed, shape (K,).

    Returns:
        ``spearman``: Spearman's correlation of level (0 for the unharmed) and score over all these inputs, 0 where all
        scores are equal; ``auroc``: level -> AUROC of the score for the harmed among the unharmed.
    """
    from scipy.stats import spearmanr

    both = {0: unharmed, **levels}
    score = torch.cat(list(both.values())).double()
    degree = torch.cat([torch.full((len(part),), float(level)) for level, part in both.items()])
    constant = bool((score == score[0]).all())
    return {
        "spearman": 0.0 if constant else float(spearmanr(degree.numpy(), score.numpy()).statistic),
        "auroc": {str(level): metrics.auroc(unharmed, part) for level, part in sorted(levels.items())},
    }
