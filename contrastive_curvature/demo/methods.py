"""The rows and columns of the table: which uncertainties are compared, by which figures."""

from __future__ import annotations

__all__ = [
    "ANGULAR",
    "CLOSED",
    "EMBEDDING",
    "FEATURES",
    "FIGURES",
    "METHODS",
    "NORM",
    "PAPER",
    "QUALITY",
    "SAMPLED",
    "SECONDS",
]

CLOSED, ANGULAR, SAMPLED = "laplace", "laplace_angular", "laplace_sampled"
EMBEDDING, FEATURES, NORM = "knn_embedding", "knn_features", "norm"

METHODS = {
    CLOSED: "Laplace, closed form",
    ANGULAR: "Laplace, closed form, 1/κ",
    SAMPLED: "Laplace, sampled networks, 1/κ",
    EMBEDDING: "10-NN distance, embedding",
    FEATURES: "10-NN distance, features",
    NORM: "minus norm of raw output",
}
"""Uncertainties of one and the same encoder.

The first is the library's own scalar, ``EmbeddingDistribution.uncertainty``: the length that raw outputs lose when they
are averaged over the posterior. The second and third are the paper's, purely angular, without and with sampling.
"""

QUALITY = {
    "map_at_1": "mAP@1",
    "map_at_5": "mAP@5",
    "map_at_10": "mAP@10",
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "ausc": "AUSC",
    "ece": "ECE",
}
"""Figures of the paper's table 2."""

FIGURES = QUALITY | {"seconds": "seconds"}
"""Columns; ``seconds`` is for the uncertainties of all test images, in and out of distribution."""

SECONDS = {
    "training": "training",
    "curvature_fit": "curvature fit and prior",
    "forward": "deterministic forward pass, all test images",
    "prediction": "prediction with uncertainty, closed form, all test images",
    "prediction_over_forward": "prediction / forward pass (ratio)",
    "prediction_sampled": "prediction with sampled networks, all test images",
    "ece": "votes of the sampled networks, for the ECE",
}
"""What is timed."""

PAPER = {
    "Warburg et al. 2023: LAM post-hoc": dict(zip(QUALITY, (0.78, 0.74, 0.72, 0.96, 0.96, 0.86, 0.03), strict=True)),
    "Warburg et al. 2023: LAM online": dict(zip(QUALITY, (0.81, 0.77, 0.76, 0.98, 0.98, 0.89, 0.02), strict=True)),
}
"""Table 2 of the paper, Fashion-MNIST: means of five runs, MNIST out of distribution."""
