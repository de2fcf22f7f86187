"""Plots of one encoder: score against degree of corruption, and error over rejection."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # files only: no display is needed, nor opened
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.transfer.judge import Judgement
from benchmarks.transfer.rows import ANSWERS, resolve
from contrastive_curvature import metrics

_SHOWN = ("diag/uncertainty", "norm", "mahalanobis", "knn_embedding")
"""Rows beside the library's answers."""
_LEAST_KEPT = 0.05
"""Of a smaller share of the queries, an error rate is one of a few."""


def draw_all(folder: Path, judgement: Judgement, title: str) -> None:
    """Draw what an encoder has, as PNG; ``title`` is its name in a table."""
    answers = [resolve(name, judgement.figures) for name in ANSWERS.values()]
    rows = [name for name in dict.fromkeys([*answers, *_SHOWN]) if name in judgement.scores] or list(judgement.scores)
    titles = {name: judgement.figures["rows"][name]["title"].replace("`", "") for name in rows}
    with plt.rc_context({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "figure.dpi": 130}):
        scores = {titles[name]: judgement.scores[name]["test"] for name in rows}
        figures = {"rejection": draw_rejection(scores, judgement.retrieval.right, f"{title}: retrieval", "queries")}
        if len(judgement.corrupted_rows):
            figures["corruption"] = draw_corruption(judgement, titles, title)
        if judgement.verified is not None:
            for combined in ("sum", "max"):
                pairs = {titles[name]: judgement.pairs[name][combined] for name in rows}
                what = f"{title}: verification, {combined} of the two scores"
                figures[f"rejection_pairs_{combined}"] = draw_rejection(pairs, judgement.verified.right, what, "pairs")
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.png", bbox_inches="tight")
            plt.close(figure)


def draw_corruption(judgement: Judgement, titles: dict[str, str], title: str) -> Figure:
    """Draw how scores grow with the degree of corruption.

    A panel for each kind: mean share of the clean inputs that a corrupted one is less certain than, which makes scores
    of all units comparable; 0.5 where corruption does not show.
    """
    names = [name.removeprefix("corrupted_") for name in judgement.scores[next(iter(titles))] if "corrupted_" in name]
    kinds = list(dict.fromkeys(name.rsplit("_", 1)[0] for name in names))
    size = (2.9 * len(kinds) + 1, 3.4)
    figure, panels = plt.subplots(1, len(kinds), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for axes, kind in zip(panels.flat, kinds, strict=True):
        levels = sorted(int(name.rsplit("_", 1)[1]) for name in names if name.rsplit("_", 1)[0] == kind)
        for row, label in titles.items():
            scores = judgement.scores[row]
            clean = scores["test"][judgement.corrupted_rows]
            shares = [metrics.auroc(clean, scores[f"corrupted_{kind}_{level}"]) for level in levels]
            axes.plot([0, *levels], [0.5, *shares], marker="o", markersize=3, label=label)
        axes.axhline(0.5, color="black", linewidth=0.8, alpha=0.5)
        axes.set(title=kind, xlabel="level (0: clean)", ylim=(0, 1.02))
    panels[0, 0].set_ylabel("share of clean inputs\nthat are more certain")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"Score against degree of corruption, {title}")
    return figure


def draw_rejection(scores: dict[str, Tensor], right: Tensor, title: str, what: str) -> Figure:
    """Draw the error among what is kept, over the share that is rejected; dashed: the best that is possible."""
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    some = right[~right.isnan()]
    for name, score in {**scores, "": 1 - right.nan_to_num(0.0)}.items():
        curve = metrics.sparsification_curve(score, right)
        kept = slice(0, max(1, round((1 - _LEAST_KEPT) * len(some))))
        style = {"label": name} if name else {"label": "errors first", "color": "black", "linestyle": "--"}
        axes.plot(curve.removed[kept].numpy(), 1 - curve.performance[kept].numpy(), linewidth=1.3, **style)
    axes.axhline(1 - float(some.mean()), color="black", linewidth=0.8, alpha=0.5)
    axes.set(xlabel=f"share of the {what} that is rejected", ylabel=f"wrong among the {what} that are kept")
    axes.set(xlim=(0, 1), ylim=(0, None))
    axes.legend(fontsize=8)
    axes.set_title(f"Error over rejection\n{title}", fontsize=10)
    return figure
