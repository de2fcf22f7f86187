"""A fitted method -> predictions, and all figures of its row: the library's, failures, the released code's definitions.

The released code (https://github.com/FrederikWarburg/bayesian-metric-learning, ``src/evaluate``) departs from the
paper's text in several of its figures; each is here under its name with ``_released``, so that both can be reported.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.data import RetrievalData, Split, rank
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
        curves: What the plots show: ``scores``, each of the test images (N,) and of those out of distribution (M,)
            or ``None``; ``precision_at_1`` of every query, NaN without a positive (N,); ``nearest``, the index of each
            query's nearest neighbour (N,); ``calibration`` of the votes: confidence, accuracy, count, error.
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
    outside = held = None
    if data.ood is not None:
        outside, more = _predict(method, data.ood)
        seconds = {name: taken + more[name] for name, taken in seconds.items()}
    if data.gallery is not None:
        held = method.predict(data.gallery)
    gallery_targets = None if data.gallery is None else data.gallery.targets

    def among_all(z: Tensor, gallery: Tensor | None) -> tuple[metrics.Ranking, Tensor]:
        return retrieve(z, data.test.targets, inside.metric, gallery, gallery_targets)

    ranking, nearest = among_all(inside.mean, None if held is None else held.mean)
    precision = metrics.average_precision_at_k(ranking, 1)
    others, among = ({} if part is None else _by_name(part) for part in (outside, held))
    scores = {name: (score, others.get(name)) for name, score in _by_name(inside).items()}
    found = _map(ranking)
    found |= {f"recall_at_{k}": metrics.recall_at_k(ranking, k) for k in (1, 5, 10)}
    if bool(precision.isnan().any()):
        found |= {f"map_at_{k}_released": map_released(ranking, k) for k in (1, 5, 10)}
    variants: dict[str, Figures] = {}
    for name, (known, unknown) in scores.items():
        variants[name] = {
            "ausc": metrics.ausc(known, precision),
            "r_auroc": r_auroc(known, precision),
            "ausc_released": ausc_released(known, ranking.relevant[:, 0], among.get(name, known)[nearest]),
            **_detection(known, unknown),
        }
    if NOVELTY in scores:
        variants[OWN] |= _detection(*scores[NOVELTY])
    for name, mean in inside.means.items():
        variants[name] |= _map(among_all(mean, None if held is None else held.means[name])[0])
    if data.calibration is not None and outside is not None and inside.p_value is not None:
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
        found["ece"], found["ece_released"] = bins.expected_calibration_error, ece_released(votes, labels)
        found["brier"], seconds["votes"] = metrics.brier_score(votes, labels), time.perf_counter() - started
        calibration = (bins.confidence, bins.accuracy, bins.count, found["ece"])
    curves = {"scores": scores, "precision_at_1": precision, "nearest": nearest, "calibration": calibration}
    return Evaluation(found, variants, seconds, curves)


def by_released_code(found: Evaluation) -> Evaluation:
    """The same with the released code's AUPRC, AUSC and ECE in place of the library's."""

    def swapped(figures: Figures) -> Figures:
        return figures | {key: figures[f"{key}_released"] for key in figures if f"{key}_released" in figures}

    variants = {name: swapped(figures) for name, figures in found.variants.items()}
    own = {key: value for key, value in variants.get(OWN, {}).items() if key in found.figures}
    return replace(found, figures=swapped(found.figures) | own, variants=variants)


def retrieve(
    z: Tensor,
    targets: Tensor,
    metric: metrics.neighbors.Metric = "cosine",
    gallery: Tensor | None = None,
    gallery_targets: Tensor | None = None,
) -> tuple[metrics.Ranking, Tensor]:
    """Find ten nearest neighbours of embeddings (N, D): which are right, and the nearest (N,)."""
    nearest = metrics.nearest_neighbors(z, gallery, k=NEIGHBORS, metric=metric)
    return rank(nearest, targets, gallery_targets), nearest[:, 0]


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


def _detection(known: Tensor, unknown: Tensor | None) -> Figures:
    if unknown is None:
        return {}
    return {
        "auroc": metrics.auroc(known, unknown),
        "auprc": metrics.auprc(known, unknown),
        "auprc_released": auprc_released(known, unknown),
    }


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


def map_released(ranking: metrics.Ranking, k: int) -> float:
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
