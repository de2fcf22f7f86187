"""The parts of an evaluation: what was measured, as numbers and lists, or why it was not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Missing:
    """Stands where a part of an evaluation cannot be computed.

    Attributes:
        reason: Why, and what to do about it, in sentences.
    """

    reason: str


@dataclass(frozen=True)
class Retrieval:
    """Recall and mean average precision.

    Attributes:
        recall: By k.
        mean_average_precision: By k.
        n_queries: Test inputs that have something of their class to find; only they count.
        gallery_size: Number of points that each of them is compared with.
        too_large: Values of k for which there are too few points.
    """

    recall: dict[int, float]
    mean_average_precision: dict[int, float]
    n_queries: int
    gallery_size: int
    too_large: list[int]


@dataclass(frozen=True)
class Errors:
    """How well the uncertainty finds the queries whose nearest neighbour is wrong.

    Attributes:
        ausc: Area under the sparsification curve.
        best_ausc: That of an order which knows what is wrong.
        r_auroc: AUROC for "the nearest neighbour is wrong", or why there is none.
        curve: Removed fraction and mean AP@1 of the rest, at most 200 points.
        best_curve: The same in the order which knows what is wrong.
        n_wrong: Queries whose nearest neighbour is wrong.
        n_queries: Test inputs that have something of their class to find.
    """

    ausc: float
    best_ausc: float
    r_auroc: float | Missing
    curve: list[list[float]]
    best_curve: list[list[float]]
    n_wrong: int
    n_queries: int


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
    bins: list[Bin]
    n_samples: int


@dataclass(frozen=True)
class Pairs:
    """How well the cosine of two test inputs says whether they are of one class.

    Attributes:
        eer: Equal error rate.
        curve: False match rate and false non-match rate, the DET curve, at most 200 points.
        n_same: Pairs of one class.
        n_different: Pairs of two classes.
    """

    eer: float
    curve: list[list[float]]
    n_same: int
    n_different: int


@dataclass(frozen=True)
class Detection:
    """How well the novelty separates unknown test inputs from known ones.

    Attributes:
        auroc: Area under the ROC curve.
        auprc: Average precision; unknown inputs are the positive class.
    """

    auroc: float
    auprc: float


@dataclass(frozen=True)
class Compared:
    """How well one score answers the two questions, to choose one by; ``None`` where there is no answer.

    Attributes:
        name: ``"uncertainty"``, ``"novelty"``, ``"mahalanobis_outputs"`` and ``"mahalanobis_relative"`` (distances
            to Gaussians of training inputs: of the outputs, and of the features with and without classes),
            ``"knn_features"`` (mean distance to the ten nearest features of the training inputs that a fit keeps, so
            not of a loaded posterior), ``"distance"`` (to the nearest point), or ``"votes"``: the share of the ten
            nearest points that are not of the class of the nearest.
        auroc: For "the input is unknown".
        auprc: The same.
        r_auroc: AUROC for "the nearest neighbour is wrong".
    """

    name: str
    auroc: float | None
    auprc: float | None
    r_auroc: float | None


@dataclass(frozen=True)
class Flagged:
    """What the decision ``p_value <= alpha`` flags as unknown.

    Attributes:
        alpha: The threshold.
        known: Share of the known test inputs, which should be about ``alpha``.
        unknown: Share of the unknown inputs; ``None`` where there are none.
        novelty: Novelty from which on inputs are flagged, to the nearest one seen; ``None`` where none is.
        deviation: Standard deviation of ``known`` by chance, of test and of calibration inputs, where it is calibrated.
    """

    alpha: float
    known: float
    unknown: float | None
    novelty: float | None
    deviation: float | None


@dataclass(frozen=True)
class Thresholds:
    """Flagged shares at many thresholds, and the histograms of the novelty.

    Attributes:
        steps: From the smallest threshold that there are enough calibration inputs for to 0.5.
        chosen: The thresholds that were asked for.
        too_small: Thresholds that were asked for and need more calibration inputs.
        n_compared: Known inputs that p-values compare with; ``None`` where that is not known.
        calibrated: Whether ``la.calibrate`` has run; otherwise they are training inputs, and p-values optimistic.
        edges: Of the bins of both histograms; the last bin holds all larger values too.
        known: Share of the known test inputs in each bin.
        unknown: Share of the unknown inputs in each bin; ``None`` where there are none.
    """

    steps: list[Flagged]
    chosen: list[Flagged]
    too_small: list[float]
    n_compared: int | None
    calibrated: bool
    edges: list[float]
    known: list[float]
    unknown: list[float] | None


@dataclass(frozen=True)
class Card:
    """One input that the page shows.

    Attributes:
        name: Its id, or its position in the data.
        item: A text, an image or a path of one; ``None`` where nothing is known but the name.
        label: Name of its class, where it has one.
        match: Name of its nearest neighbour's class, where it was searched.
        right: Whether that is its class; ``None`` where that is not known, or nothing of its class is there to find.
        uncertainty: In radians.
        p_value: Where there is one.
    """

    name: str
    item: Any
    label: str | None
    match: str | None
    right: bool | None
    uncertainty: float
    p_value: float | None


@dataclass(frozen=True)
class Group:
    """Inputs that are shown together.

    Attributes:
        title: Of the group.
        text: What they have in common, a sentence.
        cards: The inputs, the most extreme first.
    """

    title: str
    text: str
    cards: tuple[Card, ...]
