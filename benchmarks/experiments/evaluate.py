"""A fitted method -> predictions, and all figures of its row."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments import figures
from benchmarks.experiments.data import RetrievalData, Split
from benchmarks.experiments.methods import Method, Prediction
from benchmarks.experiments.methods.embed import unit
from benchmarks.experiments.methods.scores import NEIGHBORS
from benchmarks.experiments.plan import ALPHAS, NOVELTY, OWN, UNCERTAINTY
from contrastive_curvature import metrics
from contrastive_curvature.metrics import CalibrationBins, Ranking
from contrastive_curvature.metrics.neighbors import Metric

DOTS = 3000
"""Embeddings of each set that are kept for a plot: more would hide each other."""
_REPEATS = 5


@dataclass(frozen=True)
class Scores:
    """One uncertainty of all images: larger is less certain.

    Args:
        inside: In distribution, shape (N,).
        outside: Out of distribution, shape (M,); ``None`` where there are no such images.
    """

    inside: Tensor
    outside: Tensor | None


@dataclass(frozen=True)
class Curves:
    """What the plots show of a cell.

    Args:
        scores: The uncertainties; of a method with two scores, that of the retrievals under
            :data:`~benchmarks.experiments.plan.UNCERTAINTY` and under
            :data:`~benchmarks.experiments.plan.OWN`, the other under :data:`~benchmarks.experiments.plan.NOVELTY`.
        precision_at_1: Of every query, NaN without a positive, shape (N,).
        nearest: Index of each query's nearest neighbour, shape (N,).
        embeddings: Of the first test images in and out of distribution, each (at most 3000, D); of unit length where
            they are compared by cosine.
        p_values: Of "this image is of a known kind", where there are.
        calibration: Of the votes, where there are.
    """

    scores: dict[str, Scores]
    precision_at_1: Tensor
    nearest: Tensor
    embeddings: dict[str, Tensor | None]
    p_values: Scores | None
    calibration: CalibrationBins | None

    @classmethod
    def of(cls, content: dict[str, Any]) -> Curves:
        """Make what ``dataclasses.asdict`` took apart."""
        scores = {name: Scores(**parts) for name, parts in content["scores"].items()}
        p_values, bins = content["p_values"], content["calibration"]
        made = {
            "scores": scores,
            "p_values": None if p_values is None else Scores(**p_values),
            "calibration": None if bins is None else CalibrationBins(**bins),
        }
        return cls(**content | made)


@dataclass(frozen=True)
class Evaluation:
    """What one cell gave.

    Args:
        figures: Figure -> value; what the method or the data cannot give is not there, what is undefined ``None``.
        variants: Score -> figure -> value; the method's own score under :data:`~benchmarks.experiments.plan.OWN`. A
            score with embeddings of its own has the figures of their retrieval too.
        seconds: ``"predict"``: mean and uncertainty of all test images, in and out of distribution; ``"predict_NAME"``:
            the same for a variant, where it is known. ``"votes"``.
        curves: The arrays behind them.
    """

    figures: dict[str, float | None]
    variants: dict[str, dict[str, float | None]]
    seconds: dict[str, float]
    curves: Curves


def evaluate(method: Method, data: RetrievalData, *, n_votes: int, seed: int) -> Evaluation:
    """Predict and score.

    Args:
        method: Fitted.
        data: The images.
        n_votes: Sampled networks (or embeddings) that vote, for the calibration.
        seed: Of them.

    Returns:
        All that is reported.
    """
    inside, seconds = _predict(method, data.test)
    outside = None
    if data.ood is not None:
        outside, more = _predict(method, data.ood)
        seconds = {name: taken + more[name] for name, taken in seconds.items()}
    gallery = None if data.gallery is None else method.predict(data.gallery)
    retrieval = retrieve(data, inside.mean, None if gallery is None else gallery.mean, inside.metric)
    precision = metrics.average_precision_at_k(retrieval.ranking, 1)
    all_scores = _scores(inside, outside)
    held = _scores(inside if gallery is None else gallery, None)
    found = _map(retrieval)
    found |= {f"recall_at_{k}": metrics.recall_at_k(retrieval.ranking, k) for k in (1, 5, 10)}
    if bool(precision.isnan().any()):
        found |= {f"map_at_{k}_released": figures.map_released(retrieval.ranking, k) for k in (1, 5, 10)}
    variants = {
        name: _rank_figures(scores, retrieval, precision, held[name].inside) | _detection_figures(scores)
        for name, scores in all_scores.items()
    }
    if NOVELTY in all_scores:
        variants[OWN] |= _detection_figures(all_scores[NOVELTY])
    for name, mean in inside.means.items():
        held_mean = None if gallery is None else gallery.means[name]
        variants[name] |= _map(retrieve(data, mean, held_mean, inside.metric))
    calibration, voted, vote_seconds = _votes(method, data, n_votes, seed, inside.metric)
    own = variants.get(OWN, {})
    p_values = None
    if inside.p_value is not None:
        p_values = Scores(inside.p_value, None if outside is None else outside.p_value)
    kinds = {"inside": inside, "outside": outside}
    found |= _flagged(data, p_values)
    embeddings = {name: None if part is None else part.mean[:DOTS] for name, part in kinds.items()}
    if inside.metric == "cosine":
        embeddings = {name: None if z is None else unit(z) for name, z in embeddings.items()}
    return Evaluation(
        found | {name: own[name] for name in ("auroc", "auprc", "ausc", "r_auroc") if name in own} | voted,
        variants,
        seconds | ({"votes": vote_seconds} if voted else {}),
        Curves(all_scores, precision, retrieval.nearest, embeddings, p_values, calibration),
    )


_BLOCK = 256
"""Queries that are held against the whole gallery at a time."""


@dataclass(frozen=True)
class Retrieval:
    """What was retrieved from the gallery, or leave-one-out among the queries.

    Args:
        ranking: Right and wrong neighbours.
        nearest: Index of the first one, int64, shape (N,).
    """

    ranking: Ranking
    nearest: Tensor


def retrieve(data: RetrievalData, queries: Tensor, gallery: Tensor | None, metric: Metric = "cosine") -> Retrieval:
    """Find the ten nearest neighbours, and tell the right ones.

    Args:
        data: Targets of queries and gallery; with positions, its relevance (or else its relation) decides.
        queries: Embeddings, shape (N, D).
        gallery: Embeddings, shape (M, D), or ``None`` for leave-one-out.
        metric: What is near, ``"cosine"`` or ``"euclidean"``.

    Returns:
        The neighbours.
    """
    found = metrics.nearest_neighbors(queries, gallery, k=NEIGHBORS, metric=metric)
    same = data.relevance or data.relation
    if same is None:
        held = None if data.gallery is None else data.gallery.targets
        return Retrieval(metrics.rank_by_labels(found, data.test.targets, held), found[:, 0])
    targets = data.test.targets
    held = targets if data.gallery is None else data.gallery.targets
    relevant, counts = [], []
    for rows in torch.arange(len(targets)).split(_BLOCK):
        right = same(targets[rows], held)[0]
        if data.gallery is None:
            right[torch.arange(len(rows)), rows] = False
        relevant.append(right.gather(1, found[rows]))
        counts.append(right.sum(1))
    return Retrieval(Ranking(torch.cat(relevant), torch.cat(counts)), found[:, 0])


def _predict(method: Method, split: Split) -> tuple[Prediction, dict[str, float]]:
    """The prediction, and the seconds of the quickest of several: less than a second is repeated."""
    best: dict[str, float] = {}
    for _ in range(_REPEATS):
        started = time.perf_counter()
        prediction = method.predict(split)
        taken = time.perf_counter() - started
        seconds = {f"predict_{name}": known for name, known in prediction.variant_seconds.items()}
        seconds["predict"] = taken if prediction.seconds is None else prediction.seconds
        best = {name: min(value, best.get(name, value)) for name, value in seconds.items()}
        if taken > 1:
            break
    return prediction, best


def _map(retrieval: Retrieval) -> dict[str, float]:
    return {f"map_at_{k}": metrics.map_at_k(retrieval.ranking, k) for k in (1, 5, 10)}


def _scores(inside: Prediction, outside: Prediction | None) -> dict[str, Scores]:
    other = {} if outside is None else _by_name(outside)
    return {name: Scores(score, other.get(name)) for name, score in _by_name(inside).items()}


def _by_name(prediction: Prediction) -> dict[str, Tensor]:
    own = {} if prediction.uncertainty is None else {OWN: prediction.uncertainty}
    if prediction.novelty is not None and own:
        own |= {UNCERTAINTY: own[OWN], NOVELTY: prediction.novelty}
    return own | prediction.variants


def _rank_figures(scores: Scores, retrieval: Retrieval, precision: Tensor, held: Tensor) -> dict[str, float | None]:
    correct = retrieval.ranking.relevant[:, 0]
    return {
        "ausc": metrics.ausc(scores.inside, precision),
        "r_auroc": figures.r_auroc(scores.inside, precision),
        "ausc_released": figures.ausc_released(scores.inside, correct, held[retrieval.nearest]),
    }


def _detection_figures(scores: Scores) -> dict[str, float | None]:
    if scores.outside is None:
        return {}
    return {
        "auroc": metrics.auroc(scores.inside, scores.outside),
        "auprc": metrics.auprc(scores.inside, scores.outside),
        "auprc_released": figures.auprc_released(scores.inside, scores.outside),
    }


def _flagged(data: RetrievalData, p_values: Scores | None) -> dict[str, float | None]:
    """Shares of images that are taken for unknown, where there are enough known ones to say so at all."""
    if p_values is None or data.calibration is None:
        return {}
    parts = {"known": p_values.inside} | ({} if p_values.outside is None else {"unknown": p_values.outside})
    return {
        f"flagged_{name}_{alpha}": float((values <= alpha).double().mean())
        for alpha in ALPHAS
        if alpha >= 1 / (len(data.calibration) + 1)
        for name, values in parts.items()
    }


def _votes(
    method: Method, data: RetrievalData, n_votes: int, seed: int, metric: Metric
) -> tuple[CalibrationBins | None, dict[str, float | None], float]:
    """Calibration of the votes for a class, which open-set queries and positions do not have (paper, G.3)."""
    if data.open_set or data.gallery is not None or data.relation is not None:
        return None, {}, 0.0
    started = time.perf_counter()
    samples = method.samples(data.test, n_votes, seed)
    if samples is None:
        return None, {}, 0.0
    labels = data.test.targets
    votes = metrics.retrieval_votes(samples, labels, metric=metric)
    bins = metrics.calibration_bins(votes, labels)
    found = {
        "ece": bins.expected_calibration_error,
        "ece_released": figures.ece_released(votes, labels),
        "brier": metrics.brier_score(votes, labels),
    }
    return bins, found, time.perf_counter() - started
