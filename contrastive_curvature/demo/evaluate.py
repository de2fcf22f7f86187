"""One trained encoder -> posterior, predictions, and the figures of every row of the table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from contrastive_curvature import metrics
from contrastive_curvature.demo.baselines import embedding_distance, feature_distance
from contrastive_curvature.demo.config import NEIGHBORS, DemoConfig
from contrastive_curvature.demo.data import Batches, DemoData
from contrastive_curvature.demo.methods import ANGULAR, CLOSED, EMBEDDING, FEATURES, NORM, SAMPLED
from contrastive_curvature.demo.posterior import (
    closed_form,
    fit_posterior,
    forward,
    read_features,
    sampled_embeddings,
    sampled_vmf,
    timed,
)
from contrastive_curvature.metrics import CalibrationBins

__all__ = ["Evaluation", "Scores", "evaluate"]

_BATCH = 200
"""Images a forward pass; on a CPU larger batches fall out of the caches."""


@dataclass(frozen=True)
class Scores:
    """One uncertainty of all test images: larger is less certain.

    Args:
        inside: In distribution, shape (N,).
        outside: Out of distribution, shape (M,).
        seconds: What it took to compute for all of them.
    """

    inside: Tensor
    outside: Tensor
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """What one seed gave, on the CPU.

    Args:
        figures: Method -> figure -> value; ECE only where embeddings are sampled.
        scores: Method -> uncertainties.
        precision_at_1: Average precision at 1 of every test image in distribution, shape (N,).
        z_inside: Raw outputs in distribution, shape (N, D).
        z_outside: Raw outputs out of distribution, shape (M, D).
        retrieved: Class of the nearest test image, shape (N,).
        calibration: Reliability of the sampled networks' votes.
        seconds: What each step took.
        prior_precision: Mean prior precision that the library chose.
        temperature: Of the likelihood, chosen by the library.
    """

    figures: dict[str, dict[str, float]]
    scores: dict[str, Scores]
    precision_at_1: Tensor
    z_inside: Tensor
    z_outside: Tensor
    retrieved: Tensor
    calibration: CalibrationBins
    seconds: dict[str, float]
    prior_precision: float
    temperature: float


def evaluate(config: DemoConfig, data: DemoData, encoder: nn.Module, seed: int) -> Evaluation:
    """Fit the posterior, predict, and score.

    Args:
        config: What was asked for.
        data: The data sets.
        encoder: The trained encoder, in evaluation mode.
        seed: Of the sampled networks.

    Returns:
        Everything that the report and the plots show.
    """
    device = torch.device(config.device)
    train = Batches(data.train_x, data.train_y, _BATCH, device)
    inside, outside = (Batches(x, None, _BATCH, device) for x in (data.test_x, data.ood_x))
    labels = data.test_y
    la, fit_seconds = timed(lambda: fit_posterior(config, encoder, train), device)

    # The features come first: what is timed below then runs warm.
    (z_in, phi_in), (z_out, phi_out) = read_features(la, inside), read_features(la, outside)
    _, forward_seconds = timed(lambda: [forward(encoder, part) for part in (inside, outside)], device, repeats=5)
    closed, closed_seconds = timed(lambda: [closed_form(la, part) for part in (inside, outside)], device, repeats=5)
    n = config.n_samples
    drawn, sampling = timed(lambda: [sampled_vmf(la, phi, n, seed) for phi in (phi_in, phi_out)], device)
    samples = (u.cpu() for u in sampled_embeddings(la, phi_in, n, seed, "[votes for the ECE]"))
    votes, votes_seconds = timed(lambda: metrics.retrieval_votes(samples, labels), device)
    calibration = metrics.calibration_bins(votes, labels)

    z_test = torch.cat([z_in, z_out])
    (z_train, phi_train), gallery_seconds = timed(lambda: read_features(la, train, config.baseline_features), device)
    near, near_seconds = timed(lambda: embedding_distance(z_test, z_train), device)
    # One set at a time: joined, the features would stand in memory twice.
    far, far_seconds = timed(lambda: [feature_distance(phi, phi_train) for phi in (phi_in, phi_out)], device)
    share = len(phi_train) / len(z_train)

    size = len(z_in)
    scores = {
        CLOSED: Scores(closed[0][0], closed[1][0], closed_seconds),
        ANGULAR: Scores(closed[0][1], closed[1][1], closed_seconds),
        SAMPLED: Scores(drawn[0][1], drawn[1][1], forward_seconds + sampling),
        EMBEDDING: Scores(near[:size], near[size:], forward_seconds + gallery_seconds + near_seconds),
        FEATURES: Scores(far[0], far[1], forward_seconds + share * gallery_seconds + far_seconds),
        NORM: Scores(-z_in.norm(dim=1), -z_out.norm(dim=1), forward_seconds),
    }
    scores = {name: Scores(s.inside.cpu(), s.outside.cpu(), s.seconds) for name, s in scores.items()}
    own, sampled_figures, precision, retrieved = _retrieval(z_in.cpu(), drawn[0][0].cpu(), labels)
    ece = calibration.expected_calibration_error
    figures = {
        name: (sampled_figures if name == SAMPLED else own)
        | _detection(s, precision)
        | ({"ece": ece} if name in (CLOSED, ANGULAR, SAMPLED) else {})
        | {"seconds": s.seconds}
        for name, s in scores.items()
    }
    seconds = {
        "curvature_fit": fit_seconds,
        "forward": forward_seconds,
        "prediction": closed_seconds,
        "prediction_over_forward": closed_seconds / forward_seconds,
        "prediction_sampled": forward_seconds + sampling,
        "ece": votes_seconds,
    }
    return Evaluation(
        figures,
        scores,
        precision,
        z_in.cpu(),
        z_out.cpu(),
        retrieved,
        calibration,
        seconds,
        float(la.prior_precision.double().mean()),
        float(la.temperature),
    )


def _detection(scores: Scores, precision: Tensor) -> dict[str, float]:
    return {
        "auroc": metrics.auroc(scores.inside, scores.outside),
        "auprc": metrics.auprc(scores.inside, scores.outside),
        "ausc": metrics.ausc(scores.inside, precision),
    }


def _retrieval(z: Tensor, mean: Tensor, labels: Tensor) -> tuple[dict[str, float], dict[str, float], Tensor, Tensor]:
    """Leave-one-out retrieval among the test images, with the encoder's embeddings and with sampled mean directions."""
    neighbors = metrics.nearest_neighbors(z, k=NEIGHBORS)
    ranking = metrics.rank_by_labels(neighbors, labels)
    sampled = metrics.rank_by_labels(metrics.nearest_neighbors(mean.float(), k=NEIGHBORS), labels)
    own, other = ({f"map_at_{k}": metrics.map_at_k(r, k) for k in (1, 5, 10)} for r in (ranking, sampled))
    return own, other, metrics.average_precision_at_k(ranking, 1), labels[neighbors[:, 0]]
