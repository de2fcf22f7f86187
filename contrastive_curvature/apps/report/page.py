"""The page of an evaluation: one HTML file that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import math
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import contrastive_curvature
from contrastive_curvature.apps.report.thumbnails import thumbnails

if TYPE_CHECKING:
    from contrastive_curvature.apps.report.evaluation import Evaluation, Flagged

_START = 0.05


def render(evaluation: Evaluation, title: str) -> bytes:
    """Return the page in UTF-8."""
    import jinja2
    import markupsafe

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("contrastive_curvature.apps.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": _percent, "thousands": "{:,}".format, "degrees": math.degrees, "cut": _cut}
    environment.filters["at"] = lambda curve, share: min(curve, key=lambda point: abs(point[0] - share))[1]
    environment.tests["missing"] = lambda part: hasattr(part, "reason")
    folder = files("contrastive_curvature.apps.report") / "templates"
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    curves = {name: curve for name, curve in evaluation.to_plain()["curves"].items() if curve is not None}
    start = 0
    if "thresholds" in curves:
        steps = evaluation.thresholds.steps  # type: ignore[union-attr]
        start = min(range(len(steps)), key=lambda i: abs(math.log(steps[i].alpha / _START)))
        curves["slider"] = [_step(step) for step in steps]
    # Pictures of all groups have the same brightness scale.
    images = iter(thumbnails([card.item for group in evaluation.groups for card in group.cards]))
    page = environment.get_template("report.html").render(
        # Only this script runs and only this style applies, even if an input's text were not escaped; nothing is
        # loaded.
        policy=f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'",
        style=markupsafe.Markup(style),
        script=markupsafe.Markup(script),
        title=title,
        version=contrastive_curvature.__version__,
        evaluation=evaluation,
        metrics=evaluation.metrics,
        start=start,
        groups=[(group, [(card, next(images)) for card in group.cards]) for group in evaluation.groups],
        data=curves,
    )
    # A text of the user may hold half a character (a lone surrogate), which UTF-8 cannot encode.
    return page.encode("utf-8", "replace")


def _percent(share: float) -> str:
    """Return a share as text: one digit after the point, or two if it is small."""
    hundred = 100 * share
    digits = 1 if hundred >= 1 or hundred == 0 else 2
    return f"{hundred:.{digits}f} %"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _step(step: Flagged) -> dict[str, Any]:
    """Return the texts of one slider position; built here, so that they equal the texts of the tables."""
    return {
        "alpha": f"{step.alpha:g}",
        "known": _percent(step.known),
        "unknown": None if step.unknown is None else _percent(step.unknown),
        "expected": _percent(step.alpha) + ("" if step.deviation is None else f" ± {_percent(step.deviation)}"),
        "one_in": f"{round(1 / step.alpha):,}",
    }


def _cut(value: object, longest: int) -> str:
    text = str(value)
    return text if len(text) <= longest else text[: longest - 1].rstrip() + "…"
