"""The charts of an evaluation as PNG and SVG files, for papers and slides."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from contrastive_curvature import validate
from contrastive_curvature.apps.report.parts import Errors, Missing, Pairs, Reliability, Thresholds

if TYPE_CHECKING:
    from contrastive_curvature.apps.report.evaluation import Evaluation

# Two colours that people with any colour vision tell apart (Okabe and Ito, 2008).
_KNOWN, _UNKNOWN, _SOFT = "#0072B2", "#D55E00", "#6b7280"


def draw(evaluation: Evaluation) -> dict[str, bytes]:
    """Return the contents of the files by name; charts that there is no data for are left out."""
    matplotlib = validate.package("plots (to_html writes the page alone)", "matplotlib", "report")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    charts: dict[str, tuple[Any, Any]] = {
        "novelty": (_novelty, evaluation.thresholds),
        "sparsification": (_sparsification, evaluation.errors),
        "reliability": (_reliability, evaluation.reliability),
        "det": (_det, evaluation.pairs),
    }
    out: dict[str, bytes] = {}
    # The same numbers give the same files: no date, and no random ids in the SVG.
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "svg.hashsalt": "contrastive_curvature"}):
        for name, (paint, part) in charts.items():
            if isinstance(part, Missing):
                continue
            figure = Figure(figsize=(5.2, 3.4), dpi=150, layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.add_subplot()
            paint(axes, part)
            axes.spines[["top", "right"]].set_visible(False)
            for kind in ("png", "svg"):
                file = io.BytesIO()
                figure.savefig(file, format=kind, metadata={"Software": None} if kind == "png" else {"Date": None})
                out[f"{name}.{kind}"] = file.getvalue()
    return out


def _novelty(axes: Any, found: Thresholds) -> None:
    axes.stairs(found.known, found.edges, fill=True, alpha=0.55, color=_KNOWN, label="known")
    if found.unknown is not None:
        axes.stairs(found.unknown, found.edges, fill=True, alpha=0.55, color=_UNKNOWN, label="unknown")
    for flagged in found.chosen:
        if flagged.alpha == 0.05 and flagged.novelty is not None:
            axes.axvline(min(flagged.novelty, found.edges[-1]), color="black", label="alpha = 0.05")
    axes.set(xlabel="novelty", ylabel="share of inputs")
    axes.legend(frameon=False)


def _sparsification(axes: Any, found: Errors) -> None:
    axes.plot(*zip(*found.curve, strict=True), color=_KNOWN, label="by uncertainty")
    axes.plot(*zip(*found.best_curve, strict=True), color=_SOFT, linestyle="--", label="best possible")
    axes.axhline(found.curve[0][1], color=_SOFT, linestyle=":", label="any order")
    axes.set(xlabel="share of queries taken away", ylabel="share of right matches")
    axes.legend(frameon=False)


def _reliability(axes: Any, found: Reliability) -> None:
    for each in found.bins:
        axes.bar((each.low + each.high) / 2, each.accuracy, each.high - each.low, color=_KNOWN, alpha=0.3)
    axes.plot([0, 1], [0, 1], color=_SOFT, linestyle=":", label="ideal")
    pairs = [(each.confidence, each.accuracy) for each in found.bins]
    axes.plot(*zip(*pairs, strict=True), "o", color=_KNOWN, label=f"votes, ECE {found.ece:.3f}")
    axes.set(xlabel="confidence", ylabel="share of right predictions", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(frameon=False, loc="upper left")


def _det(axes: Any, found: Pairs) -> None:
    # A logarithm of 0 is none: such a rate lies on the edge, below that of one pair.
    least = 0.5 / max(found.n_same, found.n_different)
    points = [(max(x, least), max(y, least)) for x, y in found.curve]
    axes.plot(*zip(*points, strict=True), color=_KNOWN, label=f"cosine, EER {found.eer:.3f}")
    axes.plot([least, 1], [least, 1], color=_SOFT, linestyle=":", label="equal rates")
    axes.set(xlabel="false match rate", ylabel="false non-match rate", xscale="log", yscale="log")
    axes.set(xlim=(least, 1), ylim=(least, 1))
    # Curve and diagonal may reach every corner.
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
