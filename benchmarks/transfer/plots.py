"""Plots of one encoder: score against degree of corruption, and error over rejection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # files only: no display is needed, nor opened

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.transfer.gaps import resolve
from benchmarks.transfer.judge import Judgement
from benchmarks.transfer.rows import ANSWERS
from contrastive_curvature import metrics

_SHOWN = ("diag/uncertainty", "norm", "mahalanobis", "knn_embedding")
"""Rows beside the library's answers."""

_STYLE = {"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "figure.dpi": 130}
_LEAST_KEPT = 0.05
"""Of a smaller share of the queries, an error rate is one of a few."""


def draw_all(folder: Path, judgement: Judgement, title: str) -> list[Path]:
    """Draw what an encoder has, as PNG.

    Args:
        folder: Made if need be.
        judgement: Of one encoder.
        title: Its name in a table.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = _shown(judgement)
    figures: dict[str, Figure] = {}
    with plt.rc_context(_STYLE):
        kinds = _corruption(judgement, rows)
        if kinds:
            figures["corruption"] = draw_corruption(kinds, title)
        scores = {_title(judgement, name): judgement.scores[name]["test"] for name in rows}
        figures["rejection"] = draw_rejection(scores, judgement.retrieval.right, f"{title}: retrieval", "queries")
        if judgement.verified is not None:
            for combined in ("sum", "max"):
                pairs = {_title(judgement, name): judgement.pairs[name][combined] for name in rows}
                what = f"{title}: verification, {combined} of the two scores"
                figures[f"rejection_pairs_{combined}"] = draw_rejection(pairs, judgement.verified.right, what, "pairs")
        paths = []
        for name, figure in figures.items():
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], bbox_inches="tight")
            plt.close(figure)
    return paths


def draw_corruption(kinds: Mapping[str, Mapping[str, Mapping[int, Tensor]]], title: str) -> Figure:
    """Draw how scores grow with the degree of corruption.

    Args:
        kinds: Kind of corruption -> title of a score -> level (0 is clean) -> scores (K,).
        title: Of the figure.

    Returns:
        A panel for each kind: mean share of the clean inputs that a corrupted one is less certain than, which makes
        scores of all units comparable; 0.5 where corruption does not show.
    """
    size = (2.9 * len(kinds) + 1, 3.4)
    figure, panels = plt.subplots(1, len(kinds), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for axes, (kind, rows) in zip(panels.flat, kinds.items(), strict=True):
        for name, levels in rows.items():
            shares = [0.5 if level == 0 else metrics.auroc(levels[0], part) for level, part in sorted(levels.items())]
            axes.plot(sorted(levels), shares, marker="o", markersize=3, label=name)
        axes.axhline(0.5, color="black", linewidth=0.8, alpha=0.5)
        axes.set(title=kind, xlabel="level (0: clean)", ylim=(0, 1.02))
    panels[0, 0].set_ylabel("share of clean inputs\nthat are more certain")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"Score against degree of corruption, {title}")
    return figure


def draw_rejection(scores: Mapping[str, Tensor], right: Tensor, title: str, what: str) -> Figure:
    """Draw the error among what is kept, over the share that is rejected.

    Args:
        scores: Title -> scores (N,), larger is less certain.
        right: 0 or 1 of each query or pair, NaN for those that are left out, shape (N,).
        title: Of the figure.
        what: What is rejected.

    Returns:
        A line for each score; dashed: the best that is possible.
    """
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


def _shown(judgement: Judgement) -> list[str]:
    answers = [resolve(name, judgement.figures) for name in ANSWERS.values()]
    found = [name for name in dict.fromkeys([*answers, *_SHOWN]) if name in judgement.scores]
    return found or list(judgement.scores)


def _title(judgement: Judgement, name: str) -> str:
    title: str = judgement.figures["rows"][name]["title"]
    return title.replace("`", "")


def _corruption(judgement: Judgement, rows: Sequence[str]) -> dict[str, dict[str, dict[int, Tensor]]]:
    out: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name in rows:
        sets = judgement.scores[name]
        for full, score in sets.items():
            if full.startswith("corrupted_"):
                kind, level = full.removeprefix("corrupted_").rsplit("_", 1)
                levels = out.setdefault(kind, {}).setdefault(_title(judgement, name), {})
                levels[int(level)] = score
                levels[0] = sets["test"][judgement.corrupted_rows]
    return out
