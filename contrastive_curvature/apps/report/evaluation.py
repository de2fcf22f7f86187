"""What an evaluation found: the one model that the numbers, the page and the plots are written from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contrastive_curvature.apps.report import page, plots
from contrastive_curvature.apps.report.folder import NUMBERS, PAGE, check_target, write_bytes, write_report
from contrastive_curvature.apps.report.parts import (
    Compared,
    Detection,
    Errors,
    Group,
    Missing,
    Pairs,
    Reliability,
    Retrieval,
    Thresholds,
)


@dataclass(frozen=True)
class Evaluation:
    """All that was measured of a posterior; :func:`~contrastive_curvature.apps.report.evaluate` makes it.

    Attributes:
        counts: Numbers of ``test``, ``unknown`` and ``gallery`` inputs, and of ``classes`` of the test inputs.
        retrieval: recall@k and mAP@k, or why not.
        errors: AUSC and R-AUROC of the uncertainty, or why not.
        reliability: ECE, Brier score and bins of the votes of sampled networks, or why not.
        pairs: Equal error rate and DET curve of pairs of test inputs, or why not.
        detection: AUROC and AUPRC of the novelty, or why not.
        thresholds: What ``p_value <= alpha`` flags, or why not.
        compared: The scores side by side, ours and those that need a gallery but no posterior.
        groups: The inputs that the page shows.
        posterior: What was evaluated: structure, numbers, options.
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
        """Every number by its name, those that are missing left out: ``recall@1``, ``auroc``, ``flagged_known@0.05``.

        ``docs/metrics.md`` defines them. Give them to a model card with ``la.save_pretrained(folder, metrics=...)``.
        """
        return {name: value for name, value in self._figures() if not isinstance(value, Missing)}

    @property
    def missing(self) -> dict[str, str]:
        """Reasons why parts or metrics are missing, by name."""
        names = ("retrieval", "errors", "reliability", "pairs", "detection", "thresholds")
        parts = {name: part.reason for name in names if isinstance(part := getattr(self, name), Missing)}
        return parts | {name: value.reason for name, value in self._figures() if isinstance(value, Missing)}

    def _figures(self) -> Iterator[tuple[str, float | Missing]]:
        """Yield the figures of the parts that are there by name, or why one is not."""
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
        """Everything but the inputs that are shown, as numbers, texts, lists and mappings."""
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
        """:meth:`to_plain` as JSON, without NaN and infinity, which JSON does not have."""
        return json.dumps(self.to_plain(), indent=1, allow_nan=False) + "\n"

    def to_html(self, path: Path | str, *, title: str = "How sure is this encoder?") -> None:
        """Write the page: one file that loads nothing else, for any browser.

        Args:
            path: The file; its folder must exist. An old file stays where the new one cannot be written.
            title: Its heading, plain text.

        Raises:
            UnsupportedError: Pillow is not installed, and pictures of inputs are shown.
            InputError: The folder does not exist, or an item to show is no text and no image.
            OSError: The file cannot be written.
        """
        write_bytes(path, page.render(self, title))

    def save(self, folder: Path | str, *, title: str = "How sure is this encoder?") -> dict[str, Path]:
        """Write ``report.html``, ``metrics.json`` and the plots as PNG and SVG files.

        A new folder appears whole or not at all. An earlier report is replaced once all files of the new one are
        written; where that fails, it stays as it was.

        Args:
            folder: Made where it does not exist. One that is there must be empty, or hold a report alone.
            title: Heading of the page, plain text.

        Returns:
            The files by name.

        Raises:
            UnsupportedError: Pillow or matplotlib is not installed.
            InputError: The folder is a file, or holds other files than those of a report.
            OSError: A file cannot be written.
        """
        target = check_target(folder)
        contents = {PAGE: page.render(self, title), NUMBERS: self.to_json().encode(), **plots.draw(self)}
        write_report(target, contents)
        return {name: target / name for name in contents}
