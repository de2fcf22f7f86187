"""The page of an evaluation: one HTML file that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import math
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import contrastive_curvature
from contrastive_curvature.apps.report.cards import Card
from contrastive_curvature.apps.report.explain import explain, percent
from contrastive_curvature.apps.report.known import Detection, Flagged, Thresholds
from contrastive_curvature.apps.report.missing import Missing
from contrastive_curvature.apps.report.packages import check_packages
from contrastive_curvature.apps.report.reliability import Reliability
from contrastive_curvature.apps.report.retrieval import Errors, Retrieval
from contrastive_curvature.apps.report.thumbnails import thumbnails
from contrastive_curvature.errors import InputTypeError, expected

if TYPE_CHECKING:
    from contrastive_curvature.apps.report.evaluation import Evaluation

__all__ = ["render"]

_START = 0.05
_PARTS = {
    "retrieval": "Recall and mAP",
    "errors": "AUSC and R-AUROC",
    "reliability": "ECE and Brier score",
    "detection": "AUROC and AUPRC of unknown inputs",
    "thresholds": "Flagged shares",
    "r_auroc": "R-AUROC",
}
_LONGEST_TEXT = 240
_LONGEST_NAME = 80


def render(evaluation: Evaluation, title: str) -> str:
    """The page as text.

    Raises:
        InputTypeError: The title is no text.
        UnsupportedError: Jinja2 or Pillow is not installed.
    """
    if not isinstance(title, str):
        raise InputTypeError(expected("title", "a text", f"a {type(title).__name__}"))
    check_packages("jinja2")
    import jinja2
    import markupsafe

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("contrastive_curvature.apps.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = percent
    environment.filters["thousands"] = "{:,}".format
    environment.tests["missing"] = lambda value: isinstance(value, Missing)
    folder = files("contrastive_curvature.apps.report") / "templates"
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    return environment.get_template("report.html").render(
        # Nothing but these two runs or styles, even if an input's text were not escaped; and nothing is ever loaded.
        policy=f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'",
        style=markupsafe.Markup(style),
        script=markupsafe.Markup(script),
        title=title,
        version=contrastive_curvature.__version__,
        evaluation=evaluation,
        figures=_figures(evaluation),
        start=_start(evaluation.thresholds),
        rows=explain(evaluation.metrics),
        groups=_groups(evaluation),
        missing={_PARTS.get(name, name): reason for name, reason in evaluation.missing.items()},
        removed=_removed(evaluation.errors),
        data=_embedded(evaluation),
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _figures(evaluation: Evaluation) -> list[tuple[str, str, str]]:
    """The four numbers at the top: the question, its value, and what it is called."""
    retrieval, errors = evaluation.retrieval, evaluation.errors
    reliability, detection = evaluation.reliability, evaluation.detection
    recall = retrieval.recall.get(1) if isinstance(retrieval, Retrieval) else None
    r_auroc = errors.r_auroc if isinstance(errors, Errors) and not isinstance(errors.r_auroc, Missing) else None
    return [
        ("Is the nearest neighbour right?", _or_dash(recall, percent), "Recall@1"),
        ("Does the uncertainty find wrong matches?", _or_dash(r_auroc), "R-AUROC · chance 0.5"),
        (
            "Does the novelty find unknown inputs?",
            _or_dash(detection.auroc if isinstance(detection, Detection) else None),
            "AUROC · chance 0.5",
        ),
        (
            "How far is confidence from accuracy?",
            _or_dash(reliability.ece if isinstance(reliability, Reliability) else None),
            "ECE · best 0",
        ),
    ]


def _or_dash(value: float | None, shown: Any = "{:.3f}".format) -> str:
    return "–" if value is None else shown(value)


def _start(thresholds: Thresholds | Missing) -> int:
    """The step that the slider starts at."""
    if isinstance(thresholds, Missing):
        return 0
    return min(range(len(thresholds.steps)), key=lambda i: abs(math.log(thresholds.steps[i].alpha / _START)))


def _removed(errors: Errors | Missing) -> list[tuple[str, str, str]]:
    """Rows of the table below the sparsification curve: removed share, by uncertainty, best order."""
    if isinstance(errors, Missing):
        return []

    def at(curve: list[tuple[float, float]], share: float) -> str:
        return percent(min(curve, key=lambda point: abs(point[0] - share))[1])

    return [(percent(s), at(errors.curve, s), at(errors.best_curve, s)) for s in (0, 0.05, 0.1, 0.2, 0.3, 0.5)]


def _groups(evaluation: Evaluation) -> list[dict[str, Any]]:
    """The inputs to show; pictures of all groups have one scale of brightness."""
    cards = [card for group in evaluation.groups for card in group.cards]
    addresses = iter(thumbnails([card.item for card in cards]))
    return [
        {"title": group.title, "text": group.text, "cards": [_card(card, next(addresses)) for card in group.cards]}
        for group in evaluation.groups
    ]


def _card(card: Card, address: str | None) -> dict[str, Any]:
    text = None if address is not None or card.item is None else _cut(str(card.item), _LONGEST_TEXT)
    return {
        "name": _cut(card.name, _LONGEST_NAME),
        "image": address,
        "text": text,
        "label": None if card.label is None else _cut(card.label, _LONGEST_NAME),
        "match": None if card.match is None else _cut(card.match, _LONGEST_NAME),
        "right": card.right,
        "angle": f"{math.degrees(card.uncertainty):.2g}°",
        "p_value": None if card.p_value is None else f"{card.p_value:.2g}",
    }


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1].rstrip() + "…"


def _embedded(evaluation: Evaluation) -> dict[str, Any]:
    """The numbers behind the charts."""
    out: dict[str, Any] = {"counts": evaluation.counts}
    if isinstance(evaluation.thresholds, Thresholds):
        t = evaluation.thresholds
        out["thresholds"] = {
            "steps": [_step(step) for step in t.steps],
            "edges": t.edges,
            "known": t.known,
            "unknown": t.unknown,
        }
    if isinstance(evaluation.errors, Errors):
        out["sparsification"] = {"curve": evaluation.errors.curve, "best": evaluation.errors.best_curve}
    if isinstance(evaluation.reliability, Reliability):
        bins = evaluation.reliability.bins
        out["reliability"] = [[b.low, b.high, b.count, round(b.confidence, 4), round(b.accuracy, 4)] for b in bins]
    return out


def _step(step: Flagged) -> dict[str, Any]:
    """One position of the slider; its texts are made here, so that they are the same everywhere."""
    return {
        "alpha": f"{step.alpha:g}",
        "known": percent(step.known),
        "unknown": None if step.unknown is None else percent(step.unknown),
        "expected": percent(step.alpha) + ("" if step.deviation is None else f" ± {percent(step.deviation)}"),
        "one_in": f"{round(1 / step.alpha):,}",
        "novelty": step.novelty,
        "caught": [step.known, step.unknown],
    }
