"""Calibration of the votes of sampled last layers, as the experiments compute it, at several temperatures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.losses_worth.encoder import Encoder
from contrastive_curvature import metrics
from contrastive_curvature.hessian.sphere import normalize

__all__ = ["FACTORS", "vote_figures"]

NETWORKS = 30
INPUTS = 1000
FACTORS = (0.003, 0.01, 0.03, 0.1, 0.3, 3.0)
"""Of the library's temperature: the best of them, in hindsight, is what its rule is compared with."""


def vote_figures(encoder: Encoder, la: Any) -> dict[str, Any]:
    """Expected calibration error and Brier score of the votes for a class.

    Each sampled layer votes, for every test input, for the class of the nearest neighbour among the other test inputs.

    Args:
        encoder: Whose test inputs vote.
        la: Its posterior.

    Returns:
        ``ece`` and ``brier`` at the library's ``temperature``; ``ece_at_1``, the loss taken as a negative
        log-likelihood; ``ece_best``, the smallest of all, with ``best_temperature``; ``loss`` of all N ``points``, as
        the rule for the temperature takes it.
        Nothing where the test classes are not those of training.
    """
    content = encoder.content
    known = set(content.train_labels.tolist())
    if encoder.name == "faces" or not known.issuperset(content.test_labels.tolist()):
        return {}
    rows = torch.randperm(len(content.test_features), generator=torch.Generator().manual_seed(0))[:INPUTS]
    features, labels = torch.from_numpy(content.test_features)[rows], torch.from_numpy(content.test_labels)[rows]
    mean, moves = _moves(la, features, content.weight.shape)
    found = float(la.temperature)
    at = {factor * found: _votes(mean, factor**0.5 * moves, labels) for factor in (*FACTORS, 1.0)}
    at[1.0] = _votes(mean, found**-0.5 * moves, labels)
    best = min(at, key=lambda temperature: at[temperature]["ece"])
    return {
        **at[found],
        "temperature": found,
        "ece_at_1": at[1.0]["ece"],
        "ece_best": at[best]["ece"],
        "best_temperature": best,
        "loss": float(la.cost),
        "points": int(la.n_data),
    }


def _moves(la: Any, features: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Raw outputs (N, D), and how far each sampled layer moves them, shape (S, N, D)."""
    dim, width = shape
    out = []
    with torch.no_grad():
        mean = la.model(features)
        # Likelihood and prior are both over the temperature, so the same draws serve all temperatures.
        for weights in la.sampled_weights(NETWORKS, torch.Generator().manual_seed(0)):
            for sample in weights - la.mean:
                matrix, bias = sample.split([dim * width, dim])
                out.append(features @ matrix.view(dim, width).T + bias)
    return mean, torch.stack(out)


def _votes(mean: Tensor, moves: Tensor, labels: Tensor) -> dict[str, float]:
    votes = torch.stack([labels[_nearest(mean + move)] for move in moves])
    error = metrics.calibration_bins(votes, labels).expected_calibration_error
    return {"ece": error, "brier": metrics.brier_score(votes, labels)}


def _nearest(outputs: Tensor) -> Tensor:
    """Row of the nearest other output by cosine, shape (N,): as ``nearest_neighbors``, at a tenth of the time."""
    u = normalize(outputs)[0]
    return (u @ u.T).fill_diagonal_(-2.0).argmax(1)
