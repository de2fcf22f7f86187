"""Does a confidence of 90 % mean that 90 % are right? The votes of sampled networks."""

from __future__ import annotations

from dataclasses import dataclass

from contrastive_curvature import metrics
from contrastive_curvature.apps.report.missing import Missing
from contrastive_curvature.apps.report.scored import Scored

__all__ = ["Bin", "Reliability", "reliability_of"]


@dataclass(frozen=True)
class Bin:
    """Test inputs of about one confidence.

    Attributes:
        low: Confidences are larger than this,
        high: and at most this.
        count: Number of inputs.
        confidence: Their mean confidence.
        accuracy: The share of them whose prediction is right.
    """

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Reliability:
    """Calibration of the votes of sampled networks.

    Attributes:
        ece: Expected calibration error.
        brier: Brier score of the votes.
        bins: Those that are not empty.
        n_samples: Number of networks.
    """

    ece: float
    brier: float
    bins: tuple[Bin, ...]
    n_samples: int


def reliability_of(test: Scored, gallery: Scored | None) -> Reliability | Missing:
    """Let each sampled network vote for the class of every test input, with the label of the nearest neighbour.

    Args:
        test: The test inputs, with labels and sampled embeddings.
        gallery: What is searched, with labels and sampled embeddings; ``None`` for the other test inputs.
    """
    if test.samples is None or (gallery is not None and gallery.samples is None):
        return Missing("The sampled embeddings would take more than 1 GiB. Give fewer inputs or a smaller n_samples.")
    if test.labels is None:
        return Missing("The test inputs have no labels, so no prediction is right or wrong.")
    if gallery is None:
        votes = metrics.retrieval_votes(test.samples, test.labels)
    else:
        votes = metrics.retrieval_votes(test.samples, test.labels, gallery.samples, gallery.labels)
    found = metrics.calibration_bins(votes, test.labels)
    edges = found.edges.tolist()
    columns = zip(
        edges[:-1], edges[1:], found.count.tolist(), found.confidence.tolist(), found.accuracy.tolist(), strict=True
    )
    bins = tuple(Bin(*values) for values in columns if values[2])
    return Reliability(found.expected_calibration_error, metrics.brier_score(votes, test.labels), bins, len(votes))
