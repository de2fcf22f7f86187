"""The result of an evaluation: its parts, and the files that it writes."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

from contrastive_curvature.apps.report import page, plots
from contrastive_curvature.artifact import folder_path, write_whole
from contrastive_curvature.errors import InputError

_PAGE, _NUMBERS = "report.html", "metrics.json"


@dataclass(frozen=True)
class Missing:
    """Replaces a part of an evaluation that cannot be computed.

    Attributes:
        reason: The reason and what to do about it, in sentences.
    """

    reason: str


@dataclass(frozen=True)
class Retrieval:
    """Recall and mean average precision.

    Attributes:
        recall: recall@k by k.
        mean_average_precision: mAP@k by k.
        n_queries: Number of test inputs with a point of their class to find; only these count.
        gallery_size: Number of points that each query is compared with.
        too_large: Values of k that are larger than the number of points.
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
        best_ausc: Area for the best possible order, in which all wrong neighbours come first.
        r_auroc: AUROC for "the nearest neighbour is wrong", or the reason why it is missing.
        curve: Removed fraction and mean AP@1 of the remaining queries, at most 200 points.
        best_curve: The same curve for the best possible order.
        n_wrong: Number of queries whose nearest neighbour is wrong.
        n_queries: Number of test inputs with a point of their class to find.
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
    """Test inputs of similar confidence.

    Attributes:
        low: Lower end of the confidences, not included.
        high: Upper end of the confidences, included.
        count: Number of inputs.
        confidence: Mean confidence of the inputs.
        accuracy: Share of the inputs whose prediction is right.
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
        bins: The bins that are not empty.
        n_samples: Number of networks.
    """

    ece: float
    brier: float
    bins: list[Bin]
    n_samples: int


@dataclass(frozen=True)
class Pairs:
    """How well the cosine of two test inputs predicts whether they are of one class.

    Attributes:
        eer: Equal error rate.
        curve: False match rate and false non-match rate, the DET curve, at most 200 points.
        n_same: Number of pairs of one class.
        n_different: Number of pairs of two classes.
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
    """How well one score answers the two questions, to choose a score; ``None`` without an answer.

    Attributes:
        name: ``"uncertainty"``, ``"novelty"``, ``"mahalanobis_outputs"`` and ``"mahalanobis_relative"`` (distances to
            Gaussians of training inputs: of the outputs, and of the features with and without classes),
            ``"knn_features"`` (mean distance to the ten nearest features of the training inputs that a fit keeps; not
            for a loaded posterior), ``"distance"`` (to the nearest point), or ``"votes"``: the share of the ten nearest
            points whose class differs from the nearest point's.
        auroc: AUROC for "the input is unknown".
        auprc: Average precision for "the input is unknown".
        r_auroc: AUROC for "the nearest neighbour is wrong".
    """

    name: str
    auroc: float | None
    auprc: float | None
    r_auroc: float | None


@dataclass(frozen=True)
class Flagged:
    """Inputs that the decision ``p_value <= alpha`` flags as unknown.

    Attributes:
        alpha: The threshold.
        known: Flagged share of the known test inputs, which should be about ``alpha``.
        unknown: Flagged share of the unknown inputs; ``None`` without unknown inputs.
        novelty: Novelty above which inputs are flagged, estimated from the inputs; ``None`` if no input is flagged.
        deviation: Standard deviation of ``known`` by the random choice of test and calibration inputs, if calibrated.
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
        steps: Results for thresholds from the smallest that has enough calibration inputs up to 0.5.
        chosen: Results for the requested thresholds.
        too_small: Requested thresholds that need more calibration inputs.
        n_compared: Number of known inputs that p-values compare with; ``None`` if unknown.
        calibrated: Whether ``la.calibrate`` has run; otherwise p-values compare with training inputs, and are
            optimistic.
        edges: Edges of the bins of both histograms; the last bin also holds all larger values.
        known: Share of the known test inputs in each bin.
        unknown: Share of the unknown inputs in each bin; ``None`` without unknown inputs.
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
        name: Id of the input, or its position in the data.
        item: A text, an image or the path of an image; ``None`` if only the name is known.
        label: Name of its class, if it has one.
        match: Class name of its nearest neighbour, if neighbours were searched.
        right: Whether ``match`` is its class; ``None`` if unknown, or if there is no point of its class to find.
        uncertainty: Uncertainty in radians.
        p_value: P-value, if there is one.
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
        title: Title of the group.
        text: Sentence that describes the group.
        cards: The inputs, the most extreme first.
    """

    title: str
    text: str
    cards: tuple[Card, ...]


@dataclass(frozen=True)
class Evaluation:
    """All measurements of a posterior, from :func:`~contrastive_curvature.apps.report.evaluate`.

    Attributes:
        counts: Numbers of ``test``, ``unknown`` and ``gallery`` inputs, and of ``classes`` of the test inputs.
        retrieval: recall@k and mAP@k, or :class:`Missing`.
        errors: AUSC and R-AUROC of the uncertainty, or :class:`Missing`.
        reliability: ECE, Brier score and bins of the votes of sampled networks, or :class:`Missing`.
        pairs: Equal error rate and DET curve of pairs of test inputs, or :class:`Missing`.
        detection: AUROC and AUPRC of the novelty, or :class:`Missing`.
        thresholds: Inputs that ``p_value <= alpha`` flags, or :class:`Missing`.
        compared: All scores, ours and those that need a gallery but no posterior.
        groups: Inputs that the page shows.
        posterior: Description of the posterior: structure, numbers, options.
    """

    counts: dict[str, int]
    retrieval: Retrieval | Missing
    errors: Errors | Missing
    reliability: Reliability | Missing
    pairs: Pairs | Missing
    detection: Detection | Missing
    thresholds: Thresholds | Missing
    compared: tuple[Compared, ...]
    groups: tuple[Group, ...]
    posterior: dict[str, str | int | float | bool | None]

    @property
    def metrics(self) -> dict[str, float]:
        """Return all available numbers by name: ``recall@1``, ``auroc``, ``flagged_known@0.05``.

        ``docs/report.md`` defines them.
        """
        return {name: value for name, value in self._figures() if not isinstance(value, Missing)}

    @property
    def missing(self) -> dict[str, str]:
        """Return the reasons why parts or metrics are missing, by name."""
        return {name: value.reason for name, value in self._figures() if isinstance(value, Missing)}

    def _figures(self) -> Iterator[tuple[str, float | Missing]]:
        """Yield the missing parts by name, then the numbers of the other parts, or the reason if one is missing."""
        for name in ("retrieval", "errors", "reliability", "pairs", "detection", "thresholds"):
            if isinstance(part := getattr(self, name), Missing):
                yield name, part
        if isinstance(retrieval := self.retrieval, Retrieval):
            yield from ((f"recall@{k}", value) for k, value in retrieval.recall.items())
            yield from ((f"map@{k}", value) for k, value in retrieval.mean_average_precision.items())
            for k in retrieval.too_large:
                reason = f"There are {retrieval.gallery_size} points to search, fewer than {k}."
                yield f"recall@{k}, map@{k}", Missing(reason)
        if isinstance(self.errors, Errors):
            yield from (("ausc", self.errors.ausc), ("r_auroc", self.errors.r_auroc))
        if isinstance(self.reliability, Reliability):
            yield from (("ece", self.reliability.ece), ("brier", self.reliability.brier))
        if isinstance(self.pairs, Pairs):
            yield "eer", self.pairs.eer
        if isinstance(self.detection, Detection):
            yield from (("auroc", self.detection.auroc), ("auprc", self.detection.auprc))
        for one in self.compared:
            for name in ("auroc", "auprc", "r_auroc"):
                value, plain = getattr(one, name), "uncertainty" if name == "r_auroc" else "novelty"
                if value is not None and one.name != plain:
                    yield f"{name}_{one.name}", value
        if isinstance(thresholds := self.thresholds, Thresholds):
            for flagged in thresholds.chosen:
                yield f"flagged_known@{flagged.alpha:g}", flagged.known
                if flagged.unknown is not None:
                    yield f"flagged_unknown@{flagged.alpha:g}", flagged.unknown
            for alpha in thresholds.too_small:
                reason = f"{thresholds.n_compared} known inputs to compare with give no p-value of at most {alpha:g}."
                yield f"flagged_known@{alpha:g}", Missing(f"{reason} Call la.calibrate with more inputs.")

    def to_plain(self) -> dict[str, Any]:
        """Return everything but the shown inputs, as numbers, texts, lists and mappings."""
        parts = {
            "sparsification": self.errors,
            "reliability": self.reliability,
            "det": self.pairs,
            "thresholds": self.thresholds,
        }
        curves = {name: None if isinstance(part, Missing) else asdict(part) for name, part in parts.items()}
        if curves["sparsification"] is not None:
            curves["sparsification"]["r_auroc"] = self.metrics.get("r_auroc")
        return {
            "metrics": self.metrics,
            "missing": self.missing,
            "counts": dict(self.counts),
            "posterior": dict(self.posterior),
            "curves": curves,
        }

    def to_json(self) -> str:
        """Return :meth:`to_plain` as JSON, which has no NaN and no infinity."""
        return json.dumps(self.to_plain(), indent=1, allow_nan=False) + "\n"

    def to_html(self, path: Path | str, *, title: str = "How sure is this encoder?") -> None:
        """Write the page: one file that loads nothing else, for any browser.

        Args:
            path: The file; its folder must exist. If the new file cannot be written, an old file stays.
            title: Heading of the page, plain text.

        Raises:
            UnsupportedError: Pillow is not installed, and pictures of inputs are shown.
            InputError: The folder does not exist, or an item to show is neither a text nor an image.
            OSError: The file cannot be written.
        """
        write_whole(path, methodcaller("write", page.render(self, title)))

    def save(self, folder: Path | str, *, title: str = "How sure is this encoder?") -> dict[str, Path]:
        """Write ``report.html``, ``metrics.json`` and the plots as PNG and SVG files.

        A new folder appears complete or not at all. An earlier report is replaced after all files of the new one are
        written; if writing fails, the earlier report does not change.

        Args:
            folder: The folder; created if it does not exist. An existing folder must be empty, or hold only a report.
            title: Heading of the page, plain text.

        Returns:
            The files by name.

        Raises:
            UnsupportedError: Pillow or matplotlib is not installed.
            InputError: The folder is a file, or holds files that do not belong to a report.
            OSError: A file cannot be written.
        """
        target = _checked_target(folder)
        contents = {_PAGE: page.render(self, title), _NUMBERS: self.to_json().encode(), **plots.draw(self)}
        _write(target, contents)
        return {name: target / name for name in contents}


def _checked_target(folder: Path | str) -> Path:
    """Return a folder with all links followed; refuse a file, and a folder with files that are not of a report."""
    target = folder_path("folder", folder)
    foreign = sorted(
        entry.name
        for entry in (target.iterdir() if target.exists() else ())
        if not entry.name.startswith(".") and (entry.name not in {_PAGE, _NUMBERS, *plots.FILES} or not entry.is_file())
    )
    if foreign:
        wanted = "a new folder, or one with an earlier report alone"
        hint = "Name another folder: this one may hold something that nobody wants to lose."
        raise InputError("folder", wanted, f"{folder}, which holds {foreign[0]!r}", hint)
    return target


def _write(target: Path, contents: dict[str, bytes]) -> None:
    """Write the files of a report by name, and remove the files of an earlier report.

    All files are first written to a temporary folder, so that an error, such as a full disk, changes nothing. The old
    page is removed first and the new page is added last: without a page, the rest of a killed process does not look
    like a report.
    """
    is_new = not target.exists()
    # An existing folder may be the current folder or the root of a disk, which cannot be renamed.
    unfinished = (target.parent if is_new else target) / f".{target.name}.{secrets.token_hex(6)}.tmp"
    unfinished.mkdir(parents=True)
    try:
        for name, content in contents.items():
            write_whole(unfinished / name, methodcaller("write", content))
        if is_new:
            unfinished.rename(target)
            return
        for name in (_PAGE, *plots.FILES.difference(contents)):
            (target / name).unlink(missing_ok=True)
        for name in sorted(contents, key=lambda name: name == _PAGE):
            os.replace(unfinished / name, target / name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
