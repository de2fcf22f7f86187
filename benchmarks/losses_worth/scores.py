"""Scores of a posterior: the library's two answers, and one of the posterior alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from contrastive_curvature import EmbeddingDistribution

__all__ = ["SCORES", "answers"]

SCORES: dict[str, Callable[[EmbeddingDistribution, Tensor], Tensor]] = {
    "uncertainty": lambda e, _: e.uncertainty,
    "novelty": lambda e, _: e.novelty,
    "angle": lambda _, spread: spread,
}
"""From the prediction for B inputs and the variance of their directions, each (B,). ``angle``, that variance, is the
posterior's alone: no class centres, and no typical norm, enter it."""

_ENTRIES = 2**20
"""Of the covariances in memory at once."""


def answers(la: Any, features: Tensor) -> dict[str, Tensor]:
    """All scores of N inputs from one prediction, float64, shape (N,) each, larger is less certain."""
    parts: dict[str, list[Tensor]] = {name: [] for name in SCORES}
    for block in features.split(min(1024, max(1, _ENTRIES // la.n_outputs**2))):
        predicted = la(block)
        spread = predicted.tangential_variance
        for name, read in SCORES.items():
            parts[name].append(read(predicted, spread).detach().double())
    return {name: torch.cat(part) for name, part in parts.items()}
