"""Verification, identification, and what an uncertainty is worth for both (section 4 of the document)."""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import kendalltau
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from contrastive_curvature import metrics
from contrastive_curvature.errors import InputError, expected

__all__ = ["BINS", "NEIGHBORS", "auroc", "average_precision", "draw_pairs", "knn_right", "knn_right_by_match", "tau"]

BINS = 20
NEIGHBORS = 5
_CHUNK = 2**24
"""Pairs of samples whose probabilities are computed at once."""


def draw_pairs(targets: Tensor, pairs: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw pairs of different images; the first half match, the second half do not.

    Args:
        targets: Class labels, int64 (N,), of at least two classes with two images each.
        pairs: An even number.
        seed: Of the draws.

    Returns:
        Rows of the first and of the second images, int64 (pairs,).

    Raises:
        InputError: The number is odd or below 2.
    """
    if pairs < 2 or pairs % 2:
        raise InputError(expected("pairs", "an even number, at least 2", pairs))
    rng, labels, half = np.random.default_rng(seed), targets.numpy(), pairs // 2
    order = np.argsort(labels, kind="stable")
    _, start, count = np.unique(labels[order], return_index=True, return_counts=True)
    place = rng.choice(np.flatnonzero(np.repeat(count, count) > 1), half)
    its_start, its_count = np.repeat(start, count)[place], np.repeat(count, count)[place]
    partner = its_start + (place - its_start + rng.integers(1, its_count)) % its_count
    left = rng.integers(len(labels), size=half)
    others = len(labels) - np.repeat(count, count)[left]
    after = np.repeat(start + count, count)[left]
    right = (after + rng.integers(others)) % len(labels)
    first, second = np.concatenate([place, left]), np.concatenate([partner, right])
    return torch.from_numpy(order[first]), torch.from_numpy(order[second])


def average_precision(scores: Tensor, matches: Tensor) -> float:
    """Average precision of the match score of pairs (scikit-learn)."""
    return float(average_precision_score(matches.numpy(), scores.double().numpy()))


def auroc(outside: Tensor, inside: Tensor) -> float:
    """How well a score tells images to be found, where it should be larger, from others."""
    labels = np.repeat([1, 0], [len(outside), len(inside)])
    return float(roc_auc_score(labels, torch.cat([outside, inside]).double().numpy()))


def knn_right(mean: Tensor, targets: Tensor, gallery: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Which images the five nearest others name, by Euclidean distance.

    Args:
        mean: Points (N, D).
        targets: Their classes.
        gallery: Points of as many images, in whose place each image is left out; ``None`` for the same points.

    Returns:
        Whether the vote is right, booleans (N,), and the distance to the nearest neighbour (N,). Among classes with
        as many votes, the one with the nearest neighbour wins.
    """
    if gallery is None:
        nearest = metrics.nearest_neighbors(mean, k=NEIGHBORS, metric="euclidean")
        held = mean
    else:
        # One more, since an image's own twin may be among them.
        found = metrics.nearest_neighbors(mean, gallery, k=NEIGHBORS + 1, metric="euclidean")
        own = found == torch.arange(len(mean))[:, None]
        own[:, -1] |= ~own.any(1)
        nearest, held = found[~own].view(len(mean), NEIGHBORS), gallery
    distance = (mean - held[nearest[:, 0]]).norm(dim=1)
    return _vote(targets[nearest]) == targets, distance


def knn_right_by_match(samples: Tensor, others: Tensor, targets: Tensor, a: float, b: float) -> Tensor:
    """The same by match probability.

    Args:
        samples: Of N images, shape (N, K, D).
        others: Independent samples of the same images, which they are compared with, shape (N, K, D).
        targets: Classes (N,).
        a: Slope of the match probability.
        b: Its intercept.

    Returns:
        Whether the vote of the five likeliest matches among the other images is right, booleans (N,).
    """
    size = max(1, _CHUNK // (samples.shape[1] * others.shape[1] * len(others)))
    flat, k = others.flatten(0, 1), others.shape[1]
    named = []
    for rows in torch.arange(len(samples)).split(size):
        distance = torch.cdist(samples[rows].flatten(0, 1), flat, compute_mode="donot_use_mm_for_euclid_dist")
        # In place: these are by far the largest tensors here.
        match = distance.mul_(-a).add_(b).sigmoid_().view(len(rows), -1, len(others), k).mean((1, 3))
        match[torch.arange(len(rows)), rows] = -1
        named.append(_vote(targets[match.topk(NEIGHBORS, 1).indices]))
    return torch.cat(named) == targets


def tau(uncertainty: Tensor, right: Tensor, scores: Tensor | None = None) -> float | None:
    """Minus Kendall's tau of 20 bins of uncertainty and the performance in each.

    Bins have equal sizes, to one. Positive where a larger uncertainty goes with a worse performance.

    Args:
        uncertainty: Of images or pairs, shape (N,).
        right: Whether the answer is right; of pairs, whether they match.
        scores: Of pairs, their match scores: the performance is then their average precision, else the share that is
            right.

    Returns:
        In [-1, 1]; ``None`` where it has no value, as all bins perform equally, or one has no match.
    """
    order = uncertainty.argsort(stable=True)
    found = []
    for rows in order.tensor_split(BINS):
        if scores is None:
            found.append(float(right[rows].double().mean()))
        elif bool(right[rows].any()):
            found.append(average_precision(scores[rows], right[rows]))
        else:
            return None
    value = float(kendalltau(range(BINS), found).statistic)
    return None if np.isnan(value) else -value


def _vote(labels: Tensor) -> Tensor:
    """The most frequent label of each row; among equals the one that comes first."""
    counts = (labels[:, :, None] == labels[:, None, :]).sum(2)
    # argmax does not promise the first of equals.
    first = counts * labels.shape[1] - torch.arange(labels.shape[1])
    return labels.gather(1, first.argmax(1, keepdim=True)).squeeze(1)
