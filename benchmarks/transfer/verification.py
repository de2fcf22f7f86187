"""Verification: are two inputs of one class, by the cosine of their embeddings; and rejection of uncertain pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.hessian.sphere import normalize

COMBINED = {"sum": torch.add, "max": torch.maximum}
"""How the scores of the two inputs of a pair become one."""


@dataclass(frozen=True)
class Verified:
    """Decisions by cross-validation: each fold with the threshold that is best on the others.

    Args:
        right: Whether the decision is right, 0 or 1, shape (P,).
        cosine: Of each pair, shape (P,).
        accuracy: Mean over the folds.
        true_accept: True-accept rate at a false-accept rate of 1e-3.
    """

    right: Tensor
    cosine: Tensor
    accuracy: float
    true_accept: float


def verify(left: Tensor, right: Tensor, same: Tensor, fold: Tensor) -> Verified:
    """Decide which pairs are of one class.

    Args:
        left: Raw outputs, shape (P, D).
        right: Those of the other half of each pair.
        same: Whether a pair is of one class, shape (P,).
        fold: Of each pair, shape (P,).

    Raises:
        InputError: There is one fold, or a fold whose pairs are all that are of one class, or of two.
    """
    folds = fold.unique().tolist()
    if len(folds) < 2:
        raise InputError(expected("pairs_fold", "at least 2 folds", len(folds)))
    cosine = (normalize(left)[0].double() * normalize(right)[0].double()).sum(1)
    decided = torch.zeros_like(same)
    for one in folds:
        mine = fold == one
        if len(same[~mine].unique()) < 2:
            raise InputError(expected("pairs_same", "pairs of one class and of two beside every fold", f"fold {one}"))
        decided[mine] = cosine[mine] >= best_threshold(cosine[~mine], same[~mine])
    correct = (decided == same).double()
    accuracy = float(np.mean([float(correct[fold == one].mean()) for one in folds]))
    return Verified(correct, cosine, accuracy, true_accept_rate(cosine, same, 1e-3))


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


def true_accept_rate(cosine: Tensor, same: Tensor, false_accept: float) -> float:
    """Share of the pairs of one class that are accepted, when at most a given share of the others is."""
    from sklearn.metrics import roc_curve

    false, true, _ = roc_curve(same.numpy(), cosine.numpy(), drop_intermediate=False)
    return float(true[false <= false_accept].max())
