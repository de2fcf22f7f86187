"""Plots of one seed with all its finished methods, where each score is shown for the question that it answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # files only: no display is needed, nor opened

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from torch import Tensor

from benchmarks.experiments.data import RetrievalData
from benchmarks.experiments.evaluate import Scores
from benchmarks.experiments.p_values import draw_p_values
from benchmarks.experiments.pictures import draw_embeddings, draw_images
from benchmarks.experiments.plan import NOVELTY, OWN, Row, Table, known_rows, score_titles
from benchmarks.experiments.store import Curves, load_curves
from contrastive_curvature import metrics

_WITH_IMAGES = ("laplace_posthoc", "laplace_online", "pfe")
_STYLES = ("-", "--", "-.", ":")
_INSIDE, _OUTSIDE = "C0", "C3"

Found = list[tuple[Row, Curves]]


@dataclass(frozen=True)
class Shown:
    """One uncertainty in the plots.

    Args:
        title: In legends.
        inside: Of the test images, larger is less certain, shape (N,).
        outside: Of the images out of distribution, shape (M,); ``None`` where there are none.
        precision: Of each test image's nearest neighbour, NaN without a right one, shape (N,).
    """

    title: str
    inside: Tensor
    outside: Tensor | None
    precision: Tensor

    @classmethod
    def of(cls, curves: Curves, name: str, title: str, detection: bool) -> Shown:
        """A score of a cell; of a method with two, that which belongs into plots of detection, or of retrieval."""
        scores: Scores = curves.scores[name]
        if name == OWN and NOVELTY in curves.scores:
            scores = curves.scores[NOVELTY] if detection else scores
            title = f"{title}, {'novelty' if detection else 'uncertainty'}"
        return cls(title, scores.inside, scores.outside, curves.precision_at_1)


def draw_all(out: Path, data: RetrievalData, table: Table, seed: int) -> None:
    """Draw what a seed has so far into ``plots/`` of the run folder, as PNG.

    Args:
        out: Run folder.
        data: The images.
        table: Which one.
        seed: The seed.

    Raises:
        InputError: A cell's curves are damaged.
    """
    folder = out / "plots"
    folder.mkdir(exist_ok=True)
    found = [
        (row, curves)
        for row in known_rows(table)
        if (curves := load_curves(out, seed, row.key, len(data.test))) is not None
    ]
    with plt.rc_context({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "figure.dpi": 130}):
        for name, figure in _figures(data, found, table, seed):
            figure.savefig(folder / f"{name}.png", bbox_inches="tight")
            plt.close(figure)


def _figures(data: RetrievalData, found: Found, table: Table, seed: int) -> Iterator[tuple[str, Figure]]:
    ranking, detection = (
        [
            Shown.of(curves, name, title, detects)
            for row, curves in found
            for name, title in score_titles(table, row).items()
            if name in curves.scores
        ]
        for detects in (False, True)
    )
    voted = [(row, curves) for row, curves in found if curves.calibration is not None]
    if ranking:
        yield "sparsification", _sparsification(data, ranking, seed)
    if detection and data.ood is not None:
        yield "roc", _roc(data, detection, seed)
        yield "histograms", _histograms(data, detection, seed)
    if voted:
        yield "calibration", _calibration(data, voted, seed)
    for row, curves in found:
        if OWN in curves.scores and row.method in _WITH_IMAGES:
            title = f"{score_titles(table, row)[OWN]}, seed {seed}"
            yield f"images_{row.key}", draw_images(data, curves, title)
            yield f"embeddings_{row.key}", draw_embeddings(data, curves, title)
        if curves.p_values is not None:
            yield f"p_values_{row.key}", draw_p_values(data, curves.p_values, f"{row.title}, seed {seed}")


def _roc(data: RetrievalData, shown: list[Shown], seed: int) -> Figure:
    from sklearn.metrics import roc_curve

    figure, axes = plt.subplots(figsize=(9.5, 6), layout="constrained")
    for one, style in zip(shown, _styles(), strict=False):
        false, true, _ = roc_curve(*_joined(one))
        axes.plot(false, true, label=f"{one.title} ({_auroc(one):.3f})", **style)
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, alpha=0.5, label="chance (0.500)")
    axes.set(
        xlabel=f"fraction of {data.title} that is flagged (false-positive rate)",
        ylabel=f"fraction of {data.ood_title} that is flagged (true-positive rate)",
        title=f"Out-of-distribution detection, seed {seed}",
        xlim=(-0.01, 1.01),
        ylim=(-0.01, 1.01),
        aspect="equal",
    )
    axes.legend(title="flagged by (AUROC)", loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _sparsification(data: RetrievalData, shown: list[Shown], seed: int) -> Figure:
    figure, axes = plt.subplots(figsize=(9.5, 5), layout="constrained")
    lowest = 1.0
    precision = shown[0].precision.nan_to_num(2)
    if all(torch.equal(one.precision.nan_to_num(2), precision) for one in shown):
        # Of one encoder, the best order and a random one are the same for all scores.
        removed, ideal = (part.numpy() for part in metrics.sparsification_curve(-precision, shown[0].precision))
        axes.plot(100 * removed, ideal, color="black", linewidth=0.8, label="ideal: wrong ones first")
        lowest = float(shown[0].precision.nanmean())
        label = f"at random ({lowest:.3f})"
        axes.axhline(lowest, color="black", linewidth=0.8, alpha=0.5, linestyle=":", label=label)
    for one, style in zip(shown, _styles(), strict=False):
        removed, performance = (part.numpy() for part in metrics.sparsification_curve(one.inside, one.precision))
        axes.plot(
            100 * removed, performance, label=f"{one.title} ({metrics.ausc(one.inside, one.precision):.3f})", **style
        )
        # The last few queries are an average of almost nothing, and would set the scale.
        lowest = min(lowest, float(performance[: max(1, len(performance) * 97 // 100)].min()))
    pad = max(0.05 * (1 - lowest), 1e-3)
    axes.set(
        xlabel="most uncertain queries removed [%]",
        ylabel="mAP@1 of the queries that remain",
        title=f"Sparsification, {data.title}, seed {seed}",
        xlim=(0, 100),
        ylim=(lowest - pad, 1 + pad),
    )
    axes.legend(title="removed by (AUSC)", loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _calibration(data: RetrievalData, found: Found, seed: int) -> Figure:
    shape: dict[str, Any] = {"height_ratios": (3, 1), "sharex": True, "layout": "constrained"}
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9.5, 7.5), **shape)
    for (row, curves), style in zip(found, _styles(), strict=False):
        bins = curves.calibration
        if bins is None:
            continue
        edges, count = bins.edges.numpy(), bins.count.numpy()
        full = count > 0
        confidence, accuracy = bins.confidence.numpy()[full], bins.accuracy.numpy()[full]
        label = f"{row.title} ({bins.expected_calibration_error:.3f})"
        top.plot(confidence, accuracy, marker="o", markersize=4, label=label, **style)
        if len(found) > 1:
            bottom.stairs(count, edges, **style)
        else:
            # One method leaves room for its bars.
            bars: dict[str, Any] = {"width": 0.94 * (edges[1] - edges[0]), "alpha": 0.4}
            middle = (edges[:-1] + edges[1:]) / 2
            top.bar(middle[full], accuracy, **bars)
            drawn = bottom.bar(middle, count, color="C7", **bars)
            bottom.bar_label(drawn, labels=[f"{images:,}" for images in count], fontsize=7, padding=1)
    top.plot([0, 1], [0, 1], color="black", linewidth=0.8, alpha=0.5, label="perfect")
    top.set(
        ylabel="accuracy of the majority vote",
        title=f"Calibration of retrieval, {data.title}, seed {seed}",
        xlim=(0, 1.02),
        ylim=(0, 1.02),
    )
    bottom.set(xlabel="confidence: fraction of samples that vote with the majority", ylabel="test images")
    bottom.margins(y=0.2)
    top.legend(title="method (ECE)", loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _histograms(data: RetrievalData, shown: list[Shown], seed: int) -> Figure:
    columns = min(4, len(shown)) if len(shown) not in (5, 6) else 3
    lines = -(-len(shown) // columns)
    size = (4 * columns, 3.2 * lines + 0.6)
    figure, grid = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    for axes, one in zip(grid.flat, shown, strict=False):
        truth, values = _joined(one)
        # Below a decade a logarithmic axis has no tick that could be read.
        wide = 0 < 10 * values.min() < values.max()
        edges = np.geomspace(*_range(values), 51) if wide else np.linspace(*_range(values), 51)
        for kind, colour, name in ((0, _INSIDE, data.title), (1, _OUTSIDE, f"out: {data.ood_title}")):
            part = values[truth == kind]
            # Fractions, not densities: on a logarithmic axis a density has no unit that one could read.
            weights = np.full(len(part), 100 / len(part))
            axes.hist(part, bins=edges, weights=weights, color=colour, alpha=0.55, label=name)
        axes.set_title(f"{one.title}\nAUROC {_auroc(one):.3f}", fontsize=9)
        axes.set(xscale="log" if wide else "linear", ylabel="images [% a bin]")
        if wide:
            label_logarithmic(axes, float(values.min()), float(values.max()))
        else:
            # Scores that hardly differ have long labels.
            axes.xaxis.set_major_locator(MaxNLocator(4))
    for axes in grid[-1]:
        axes.set_xlabel("score (larger: less certain)")
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    # Outside: the peaks stand at another place in every run.
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(f"Scores in and out of distribution, seed {seed}")
    return figure


def label_logarithmic(axes: Axes, low: float, high: float) -> None:
    """Label a logarithmic x-axis from ``low`` to ``high`` so that labels neither overlap nor are missing."""
    axes.xaxis.set_minor_formatter(NullFormatter())
    if high < 100 * low:
        # Powers of ten alone would label one tick, or none.
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _styles() -> Iterator[dict[str, Any]]:
    for style in _STYLES:
        for number in range(10):
            yield {"color": f"C{number}", "linestyle": style}


def _range(values: np.ndarray) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    # One value for all images still needs a bin of some width.
    return (low, high) if high > low else (low - abs(low) / 2 - 1e-12, high + abs(high) / 2 + 1e-12)


def _auroc(one: Shown) -> float:
    return metrics.auroc(one.inside, _outside(one))


def _joined(one: Shown) -> tuple[np.ndarray, np.ndarray]:
    """Whether an image is out of distribution, and its uncertainty."""
    outside = _outside(one)
    truth = torch.cat([torch.zeros(len(one.inside)), torch.ones(len(outside))])
    return truth.numpy(), torch.cat([one.inside, outside]).double().numpy()


def _outside(one: Shown) -> Tensor:
    if one.outside is None:
        msg = "drawn only where there are images out of distribution"
        raise RuntimeError(msg)
    return one.outside
