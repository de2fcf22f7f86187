"""What an evaluation found, and the forms that it is written in."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from contrastive_curvature.apps.report.cards import Group
from contrastive_curvature.apps.report.folder import NUMBERS, PAGE, check_target, write_report, writing
from contrastive_curvature.apps.report.known import Detection, Thresholds
from contrastive_curvature.apps.report.missing import Missing
from contrastive_curvature.apps.report.reliability import Reliability
from contrastive_curvature.apps.report.retrieval import Errors, Retrieval
from contrastive_curvature.artifact import write_whole

__all__ = ["Evaluation"]


@dataclass(frozen=True)
class Evaluation:
    """All that was measured of a posterior; :func:`~contrastive_curvature.apps.report.evaluate` makes it.

    Attributes:
        counts: Numbers of ``test``, ``unknown`` and ``gallery`` inputs, and of ``classes`` of the test inputs.
        retrieval: recall@k and mAP@k, or why not.
        errors: AUSC and R-AUROC of the uncertainty, or why not.
        reliability: ECE, Brier score and bins of the votes of sampled networks, or why not.
        detection: AUROC and AUPRC of the novelty, or why not.
        thresholds: What ``p_value <= alpha`` flags, or why not.
        groups: The inputs that the page shows.
        posterior: What was evaluated: structure, numbers, options.
    """

    counts: dict[str, int]
    retrieval: Retrieval | Missing
    errors: Errors | Missing
    reliability: Reliability | Missing
    detection: Detection | Missing
    thresholds: Thresholds | Missing
    groups: tuple[Group, ...]
    posterior: dict[str, str | int | float | bool | None]

    @property
    def metrics(self) -> dict[str, float]:
        """Every number by its name, those that are missing left out: ``recall@1``, ``auroc``, ``flagged_known@0.05``.

        ``docs/metrics.md`` defines them. Give them to a model card with ``la.save_pretrained(folder, metrics=...)``.
        """
        out: dict[str, float] = {}
        if isinstance(self.retrieval, Retrieval):
            out |= {f"recall@{k}": value for k, value in self.retrieval.recall.items()}
            out |= {f"map@{k}": value for k, value in self.retrieval.mean_average_precision.items()}
        if isinstance(self.errors, Errors):
            out["ausc"] = self.errors.ausc
            if not isinstance(self.errors.r_auroc, Missing):
                out["r_auroc"] = self.errors.r_auroc
        if isinstance(self.reliability, Reliability):
            out |= {"ece": self.reliability.ece, "brier": self.reliability.brier}
        if isinstance(self.detection, Detection):
            out |= {"auroc": self.detection.auroc, "auprc": self.detection.auprc}
        if isinstance(self.thresholds, Thresholds):
            for flagged in self.thresholds.chosen:
                out[f"flagged_known@{flagged.alpha:g}"] = flagged.known
                if flagged.unknown is not None:
                    out[f"flagged_unknown@{flagged.alpha:g}"] = flagged.unknown
        return out

    @property
    def missing(self) -> dict[str, str]:
        """By name of the part or metric, why it is not there."""
        names = ("retrieval", "errors", "reliability", "detection", "thresholds")
        out = {name: part.reason for name in names if isinstance(part := getattr(self, name), Missing)}
        if isinstance(self.retrieval, Retrieval):
            for k in self.retrieval.too_large:
                out[f"recall@{k}, map@{k}"] = (
                    f"There are {self.retrieval.gallery_size} points to search, fewer than {k}."
                )
        if isinstance(self.errors, Errors) and isinstance(self.errors.r_auroc, Missing):
            out["r_auroc"] = self.errors.r_auroc.reason
        if isinstance(self.thresholds, Thresholds):
            for alpha in self.thresholds.too_small:
                text = (
                    f"{self.thresholds.n_compared} known inputs to compare with give no p-value of at most {alpha:g}."
                )
                out[f"flagged_known@{alpha:g}"] = f"{text} Call la.calibrate with more inputs."
        return out

    def to_plain(self) -> dict[str, Any]:
        """Everything but the inputs that are shown, as numbers, texts, lists and mappings."""
        return {
            "metrics": self.metrics,
            "missing": self.missing,
            "counts": dict(self.counts),
            "posterior": dict(self.posterior),
            "curves": {
                "sparsification": _plain(self.errors),
                "reliability": _plain(self.reliability),
                "thresholds": _plain(self.thresholds),
            },
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
            UnsupportedError: Jinja2 or Pillow is not installed.
            InputError: The folder does not exist, or an item to show is no text and no image.
            OSError: The file cannot be written.
        """
        from contrastive_curvature.apps.report.page import render

        page = _encoded(render(self, title))
        write_whole(path, writing(page))

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
            UnsupportedError: Jinja2, Pillow or matplotlib is not installed.
            InputError: The folder is a file, or holds other files than those of a report.
            OSError: A file cannot be written.
        """
        from contrastive_curvature.apps.report.page import render
        from contrastive_curvature.apps.report.plots import draw

        target = check_target(folder)
        page, numbers = _encoded(render(self, title)), self.to_json().encode()
        contents = {PAGE: page, NUMBERS: numbers, **draw(self)}
        write_report(target, contents)
        return {name: target / name for name in contents}


def _encoded(page: str) -> bytes:
    """UTF-8; a text of the user may hold half a character, which has no code."""
    return page.encode("utf-8", "replace")


def _plain(value: Any) -> Any:
    if isinstance(value, Missing):
        return None
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value
