"""The charts of an evaluation as PNG and SVG files, for papers and slides."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from contrastive_curvature import validate

if TYPE_CHECKING:
    from contrastive_curvature.apps.report.evaluation import Errors, Evaluation, Pairs, Reliability, Thresholds

# Two colours that people with any colour vision can distinguish (Okabe and Ito, 2008).
_KNOWN, _UNKNOWN, _SOFT = "#0072B2", "#D55E00", "#6b7280"


def draw(evaluation: Evaluation) -> dict[str, bytes]:
    """Return the contents of the files by name; charts without data are left out."""
    matplotlib = validate.package("plots (to_html writes the page alone)", "matplotlib", "report")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    missing, out = evaluation.missing, {}
    # The same numbers give the same files: no date, and no random ids in the SVG.
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "svg.hashsalt": "contrastive_curvature"}):
        for name, (paint, part) in _CHARTS.items():
            if part in missing:
                continue
            figure = Figure(figsize=(5.2, 3.4), dpi=150, layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.add_subplot()
            paint(axes, getattr(evaluation, part))
            axes.spines[["top", "right"]].set_visible(False)
            for kind in _KINDS:
                file = io.BytesIO()
                figure.savefig(file, format=kind, metadata={"Software": None} if kind == "png" else {"Date": None})
                out[f"{name}.{kind}"] = file.getvalue()
    return out


def _novelty(axes: Any, thresholds: Thresholds) -> None:
    axes.stairs(thresholds.known, thresholds.edges, fill=True, alpha=0.55, color=_KNOWN, label="known")
    if thresholds.unknown is not None:
        axes.stairs(thresholds.unknown, thresholds.edges, fill=True, alpha=0.55, color=_UNKNOWN, label="unknown")
    for flagged in thresholds.chosen:
        if flagged.alpha == 0.05 and flagged.novelty is not None:
            axes.axvline(min(flagged.novelty, thresholds.edges[-1]), color="black", label="alpha = 0.05")
    axes.set(xlabel="novelty", ylabel="share of inputs")
    axes.legend(frameon=False)


def _sparsification(axes: Any, errors: Errors) -> None:
    axes.plot(*zip(*errors.curve, strict=True), color=_KNOWN, label="by uncertainty")
    axes.plot(*zip(*errors.best_curve, strict=True), color=_SOFT, linestyle="--", label="best possible")
    axes.axhline(errors.curve[0][1], color=_SOFT, linestyle=":", label="any order")
    axes.set(xlabel="share of queries taken away", ylabel="share of right matches")
    axes.legend(frameon=False)


def _reliability(axes: Any, reliability: Reliability) -> None:
    for each in reliability.bins:
        axes.bar((each.low + each.high) / 2, each.accuracy, each.high - each.low, color=_KNOWN, alpha=0.3)
    axes.plot([0, 1], [0, 1], color=_SOFT, linestyle=":", label="ideal")
    points = [(each.confidence, each.accuracy) for each in reliability.bins]
    axes.plot(*zip(*points, strict=True), "o", color=_KNOWN, label=f"votes, ECE {reliability.ece:.3f}")
    axes.set(xlabel="confidence", ylabel="share of right predictions", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(frameon=False, loc="upper left")


def _det(axes: Any, pairs: Pairs) -> None:
    # 0 has no logarithm: such a rate is drawn at the edge, below the rate of one pair.
    least = 0.5 / max(pairs.n_same, pairs.n_different)
    points = [(max(x, least), max(y, least)) for x, y in pairs.curve]
    axes.plot(*zip(*points, strict=True), color=_KNOWN, label=f"cosine, EER {pairs.eer:.3f}")
    axes.plot([least, 1], [least, 1], color=_SOFT, linestyle=":", label="equal rates")
    axes.set(xlabel="false match rate", ylabel="false non-match rate", xscale="log", yscale="log")
    axes.set(xlim=(least, 1), ylim=(least, 1))
    # The legend is outside, because curve and diagonal may reach every corner.
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)


_KINDS = ("png", "svg")
_CHARTS: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "novelty": (_novelty, "thresholds"),
    "sparsification": (_sparsification, "errors"),
    "reliability": (_reliability, "reliability"),
    "det": (_det, "pairs"),
}
FILES = frozenset(f"{name}.{kind}" for name in _CHARTS for kind in _KINDS)
"""Names of all files of charts."""
