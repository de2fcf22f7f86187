"""A fitted method -> predictions, and all figures of its row."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from benchmarks.experiments import figures
from benchmarks.experiments.data import RetrievalData, Split
from benchmarks.experiments.methods.scores import NEIGHBORS
from benchmarks.experiments.plan import ALPHAS, NOVELTY, OWN, UNCERTAINTY
from benchmarks.experiments.training import Fitted, Prediction
from contrastive_curvature import metrics

_REPEATS = 5
Figures = dict[str, float | None]


@dataclass(frozen=True)
class Evaluation:
    """What one cell gave.

    Args:
        figures: Figure -> value; what the method or the data cannot give is not there, what is undefined ``None``.
        variants: Score -> figure -> value; the method's own score under :data:`~benchmarks.experiments.plan.OWN`. A
            score with embeddings of its own has the figures of their retrieval too.
        seconds: ``"predict"``: mean and uncertainty of all test images, in and out of distribution; ``"predict_NAME"``:
            the same for a variant, where it is known. ``"votes"``.
        curves: What the plots show: ``scores``, each of the test images (N,) and of those out of distribution (M,);
            ``precision_at_1`` of every query, NaN without a positive (N,); ``nearest``, the index of each query's
            nearest neighbour (N,); ``calibration`` of the votes: confidence, accuracy, count, error.
    """

    figures: Figures
    variants: dict[str, Figures]
    seconds: dict[str, float]
    curves: dict[str, Any]


def evaluate(method: Fitted, data: RetrievalData, *, n_votes: int, seed: int) -> Evaluation:
    """Predict and score.

    Args:
        method: What to ask.
        data: The images.
        n_votes: Sampled networks (or embeddings) that vote, for the calibration.
        seed: Of them.
    """
    inside, seconds = _predict(method, data.test)
    outside, more = _predict(method, data.ood)
    seconds = {name: taken + more[name] for name, taken in seconds.items()}
    ranking, nearest = retrieve(inside.mean, data.test.targets, inside.metric)
    precision = metrics.average_precision_at_k(ranking, 1)
    others = _by_name(outside)
    scores = {name: (score, others[name]) for name, score in _by_name(inside).items()}
    found = _map(ranking)
    found |= {f"recall_at_{k}": metrics.recall_at_k(ranking, k) for k in (1, 5, 10)}
    if bool(precision.isnan().any()):
        found |= {f"map_at_{k}_released": figures.map_released(ranking, k) for k in (1, 5, 10)}
    variants: dict[str, Figures] = {}
    for name, (known, unknown) in scores.items():
        variants[name] = {
            "ausc": metrics.ausc(known, precision),
            "r_auroc": figures.r_auroc(known, precision),
            "ausc_released": figures.ausc_released(known, ranking.relevant[:, 0], known[nearest]),
            **_detection(known, unknown),
        }
    if NOVELTY in scores:
        variants[OWN] |= _detection(*scores[NOVELTY])
    for name, mean in inside.means.items():
        variants[name] |= _map(retrieve(mean, data.test.targets, inside.metric)[0])
    if data.calibration is not None and inside.p_value is not None and outside.p_value is not None:
        for alpha in ALPHAS:
            # Where there are enough known images to say so at all.
            if alpha >= 1 / (len(data.calibration) + 1):
                found[f"flagged_known_{alpha}"] = float((inside.p_value <= alpha).double().mean())
                found[f"flagged_unknown_{alpha}"] = float((outside.p_value <= alpha).double().mean())
    own = variants.get(OWN, {})
    found |= {name: own[name] for name in ("auroc", "auprc", "ausc", "r_auroc") if name in own}
    calibration = None
    # Votes for a class, which open-set queries do not have (paper, G.3).
    if method.samples is not None and not data.open_set:
        started, labels = time.perf_counter(), data.test.targets
        votes = metrics.retrieval_votes(method.samples(data.test, n_votes, seed), labels, metric=inside.metric)
        bins = metrics.calibration_bins(votes, labels)
        found["ece"], found["ece_released"] = bins.expected_calibration_error, figures.ece_released(votes, labels)
        found["brier"], seconds["votes"] = metrics.brier_score(votes, labels), time.perf_counter() - started
        calibration = (bins.confidence, bins.accuracy, bins.count, found["ece"])
    curves = {"scores": scores, "precision_at_1": precision, "nearest": nearest, "calibration": calibration}
    return Evaluation(found, variants, seconds, curves)


def retrieve(z: Tensor, labels: Tensor, metric: metrics.neighbors.Metric = "cosine") -> tuple[metrics.Ranking, Tensor]:
    """Find ten nearest neighbours of embeddings (N, D), leave-one-out: which are right, and the nearest (N,)."""
    nearest = metrics.nearest_neighbors(z, k=NEIGHBORS, metric=metric)
    return metrics.rank_by_labels(nearest, labels), nearest[:, 0]


def _predict(method: Fitted, split: Split) -> tuple[Prediction, dict[str, float]]:
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


def _map(ranking: metrics.Ranking) -> Figures:
    return {f"map_at_{k}": metrics.map_at_k(ranking, k) for k in (1, 5, 10)}


def _by_name(prediction: Prediction) -> dict[str, Tensor]:
    own = {} if prediction.uncertainty is None else {OWN: prediction.uncertainty}
    if prediction.novelty is not None:
        own |= {UNCERTAINTY: own[OWN], NOVELTY: prediction.novelty}
    return own | prediction.variants


def _detection(known: Tensor, unknown: Tensor) -> Figures:
    return {
        "auroc": metrics.auroc(known, unknown),
        "auprc": metrics.auprc(known, unknown),
        "auprc_released": figures.auprc_released(known, unknown),
    }
