"""All figures of one fitted method on the four test parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.data.split import Split
from benchmarks.experiments.methods.hedged import Hedged
from benchmarks.experiments.methods.hedged_pairs import PairMethod
from benchmarks.experiments.methods.lifted import LaplaceLifted
from benchmarks.ndigit.scoring import auroc, average_precision, draw_pairs, knn_right, knn_right_by_match, tau

__all__ = ["PARTS", "judge"]

PARTS = ("seen_clean", "seen_corrupt", "novel_clean", "novel_corrupt")
_SEEN = PARTS[:2]
_NETWORKS = 100
"""Sampled networks behind LAM's match probability."""
_SAMPLES = 8
"""Of an image, for its match probability (document, section 2.2)."""


def judge(method: PairMethod | LaplaceLifted, parts: dict[str, Split], pairs: int, seed: int) -> dict[str, Any]:
    """Compute the figures.

    Args:
        method: Fitted.
        parts: The four of :data:`PARTS`.
        pairs: Test pairs of each part, half of which match.
        seed: Of the pairs and of samples.

    Returns:
        Figures by part, and ``"detection"``: AUROC of each score in telling corrupt images, and images of novel
        classes, from clean ones of seen classes.
    """
    found: dict[str, Any] = {}
    scores: dict[str, dict[str, Tensor]] = {}
    clean: Tensor | None = None
    for name in PARTS:
        figures, scores[name], mean = _part(method, parts[name], pairs, seed, matching=name in _SEEN)
        if name == "seen_corrupt" and clean is not None:
            right, _ = knn_right(mean, parts[name].targets, clean)
            figures["knn_clean_gallery"] = float(right.double().mean())
        clean = mean if name == "seen_clean" else clean
        found[name] = figures
    inside = scores["seen_clean"]
    found["detection"] = {
        score: {name: auroc(scores[name][score], inside[score]) for name in PARTS[1:]} for score in inside
    }
    if not isinstance(method, LaplaceLifted) and _has_match(method):
        found["match"] = dict(zip("ab", method.match, strict=True))
    return found


def _part(
    method: PairMethod | LaplaceLifted, split: Split, pairs: int, seed: int, matching: bool
) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """Figures of a part, its images' scores by name, and their points."""
    predicted, targets = method.predict(split), split.targets
    right, distance = knn_right(predicted.mean, targets)
    i, j = draw_pairs(targets, pairs, seed)
    match = _match_scores(method, split, i, j, predicted.mean, seed)
    same = targets[i] == targets[j]
    figures: dict[str, Any] = {
        "ap": average_precision(match, same),
        "ap_of_means": average_precision(-(predicted.mean[i] - predicted.mean[j]).norm(dim=1), same),
        "knn": float(right.double().mean()),
    }
    scores = {"nearest": distance}
    if predicted.uncertainty is not None:
        scores["uncertainty"] = predicted.uncertainty
    if predicted.novelty is not None:
        scores["novelty"] = predicted.novelty
    if isinstance(method, LaplaceLifted):
        scores["lam_mismatch"] = _disagreement(method, split, seed)
    figures["tau_ap"] = {name: tau((s[i] + s[j]) / 2, same, match) for name, s in scores.items()}
    figures["tau_knn"] = {name: tau(s, right) for name, s in scores.items()}
    if isinstance(method, Hedged) and matching:
        draws = (method.draw(split, _SAMPLES, 2 * seed + 10 + at) for at in (0, 1))
        voted = knn_right_by_match(*draws, targets, *method.match)
        figures["knn_by_match"] = float(voted.double().mean())
    return figures, scores, predicted.mean


def _match_scores(
    method: PairMethod | LaplaceLifted, split: Split, i: Tensor, j: Tensor, mean: Tensor, seed: int
) -> Tensor:
    """How likely pairs match; of points minus the distance, which ranks pairs as their match probability does."""
    if isinstance(method, LaplaceLifted):
        return method.match_probability(split.take(i), split.take(j), _NETWORKS, seed)
    if isinstance(method, Hedged):
        return method.match_probability(split.take(i), split.take(j), _SAMPLES, seed)
    return -(mean[i] - mean[j]).norm(dim=1)


def _disagreement(method: LaplaceLifted, split: Split, seed: int) -> Tensor:
    """Self-mismatch of the points that two sets of sampled networks give (Eq. 9, of LAM's distribution)."""
    a, b = method.match
    points = method.points(split, 2 * _NETWORKS, seed)
    apart = torch.cdist(points[:, :_NETWORKS], points[:, _NETWORKS:], compute_mode="donot_use_mm_for_euclid_dist")
    return 1 - torch.sigmoid(b - a * apart).mean((1, 2))


def _has_match(method: PairMethod) -> bool:
    return getattr(method, "loss", "soft") == "soft"
