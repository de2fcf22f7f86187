"""Plots of the figures: ROC, sparsification, calibration and histograms. Drawing of points and images: ``pictures``."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # files only: no display is needed, nor opened

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from contrastive_curvature import metrics
from contrastive_curvature.demo.data import DemoData
from contrastive_curvature.demo.evaluate import Evaluation, Scores
from contrastive_curvature.demo.methods import ANGULAR, CLOSED, EMBEDDING, FEATURES, METHODS, NORM, SAMPLED
from contrastive_curvature.demo.pictures import draw_embeddings, draw_images
from contrastive_curvature.metrics import CalibrationBins

__all__ = ["PLOTS", "draw_all", "label_logarithmic"]

PLOTS = (
    "roc.png",
    "sparsification.png",
    "calibration.png",
    "uncertainty_histograms.png",
    "embeddings.png",
    "images.png",
)

_STYLES = {
    CLOSED: "-",
    ANGULAR: (0, (8, 2)),
    SAMPLED: "--",
    EMBEDDING: "-.",
    FEATURES: (0, (1, 1)),
    NORM: (0, (5, 1, 1, 1, 1, 1)),
}
_COLOURS = {CLOSED: "C0", ANGULAR: "C4", SAMPLED: "C1", EMBEDDING: "C2", FEATURES: "C3", NORM: "C7"}
_INSIDE, _OUTSIDE = "C0", "C3"


def draw_all(folder: Path, data: DemoData, run: Evaluation, seed: int) -> None:
    """Draw every plot of one seed.

    Args:
        folder: Where the files named in :data:`PLOTS` go.
        data: The test images.
        run: What the seed gave.
        seed: For the titles.
    """
    with plt.rc_context({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "figure.dpi": 130}):
        figures = (
            _roc(run, data.ood_name, seed),
            _sparsification(run, seed),
            _calibration(run.calibration, seed),
            _histograms(run, data.ood_name, seed),
            draw_embeddings(data, run, seed),
            draw_images(data, run, seed),
        )
        for name, figure in zip(PLOTS, figures, strict=True):
            figure.savefig(folder / name, bbox_inches="tight")
            plt.close(figure)


def _roc(run: Evaluation, ood_name: str, seed: int) -> Figure:
    from sklearn.metrics import roc_curve

    figure, axes = plt.subplots(figsize=(6, 6), layout="constrained")
    for method, scores in run.scores.items():
        truth, values = _joined(scores)
        false, true, _ = roc_curve(truth, values)
        label = f"{METHODS[method]} ({run.figures[method]['auroc']:.3f})"
        axes.plot(false, true, color=_COLOURS[method], linestyle=_STYLES[method], label=label)
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, alpha=0.5, label="chance (0.500)")
    axes.set(
        xlabel="share of test images in distribution that are flagged (false positives)",
        ylabel=f"share of {ood_name} that is flagged (true positives)",
        title=f"Out-of-distribution detection, seed {seed}",
        xlim=(-0.01, 1.01),
        ylim=(-0.01, 1.01),
        aspect="equal",
    )
    axes.legend(title="flagged by (AUROC)", loc="lower right")
    return figure


def _sparsification(run: Evaluation, seed: int) -> Figure:
    figure, axes = plt.subplots(figsize=(9.5, 5), layout="constrained")
    precision = run.precision_at_1
    removed, ideal = (t.numpy() for t in metrics.sparsification_curve(-precision, precision))
    axes.plot(100 * removed, ideal, color="black", linewidth=0.8, label="ideal: wrong ones first")
    lowest = float(precision.mean())
    for method, scores in run.scores.items():
        removed, performance = (t.numpy() for t in metrics.sparsification_curve(scores.inside, precision))
        label = f"{METHODS[method]} ({run.figures[method]['ausc']:.3f})"
        axes.plot(100 * removed, performance, color=_COLOURS[method], linestyle=_STYLES[method], label=label)
        # The last few queries are an average of almost nothing, and would set the scale.
        lowest = min(lowest, float(performance[: max(1, len(precision) * 97 // 100)].min()))
    base = float(precision.mean())
    pad = max(0.05 * (1 - lowest), 1e-3)
    axes.axhline(base, color="black", linewidth=0.8, alpha=0.5, linestyle=":", label=f"at random ({base:.3f})")
    axes.set(
        xlabel="most uncertain test images removed [%]",
        ylabel="mAP@1 of the images that remain",
        title=f"Sparsification, in distribution, seed {seed}",
        xlim=(0, 100),
        ylim=(lowest - pad, 1 + pad),
    )
    axes.legend(title="removed by (AUSC)", loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _calibration(bins: CalibrationBins, seed: int) -> Figure:
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(5.5, 7), height_ratios=(3, 1), sharex=True, layout="constrained"
    )
    edges, count = bins.edges.numpy(), bins.count.numpy()
    full = count > 0
    confidence, accuracy = bins.confidence.numpy()[full], bins.accuracy.numpy()[full]
    width = float(edges[1] - edges[0])
    middle = (edges[:-1] + edges[1:]) / 2
    top.bar(middle[full], accuracy, width=0.94 * width, color="C0", alpha=0.75, label="accuracy of the bin")
    top.plot([0, 1], [0, 1], color="black", linewidth=0.8, label="perfect calibration")
    top.plot(confidence, accuracy, "o-", color="C1", markersize=4, label="at the bin's mean confidence")
    error = bins.expected_calibration_error
    top.set(ylabel="accuracy of the majority vote", title=f"Calibration of retrieval, ECE {error:.3f}, seed {seed}")
    top.set(xlim=(0, 1), ylim=(0, 1.02))
    top.legend(loc="upper left")
    bars = bottom.bar(middle, count, width=0.94 * width, color="C7")
    bottom.bar_label(bars, labels=[f"{images:,}" for images in count], fontsize=7, padding=1)
    bottom.set(xlabel="confidence: share of sampled networks voting with the majority", ylabel="test images")
    bottom.margins(y=0.15)
    return figure


def _histograms(run: Evaluation, ood_name: str, seed: int) -> Figure:
    figure, panels = plt.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
    for axes, method in zip(panels, (CLOSED, ANGULAR, SAMPLED), strict=True):
        truth, values = _joined(run.scores[method])
        edges = np.geomspace(values.min(), values.max(), 61)
        for kind, colour, name in ((0, _INSIDE, "in distribution"), (1, _OUTSIDE, f"out: {ood_name}")):
            part = values[truth == kind]
            # Shares, not densities: on a logarithmic axis a density has no unit that one could read.
            weights = np.full(len(part), 100 / len(part))
            axes.hist(part, bins=edges, weights=weights, color=colour, alpha=0.55, label=name)
        axes.set(
            xscale="log",
            xlabel="uncertainty (units of the raw outputs)" if method == CLOSED else "1/κ (no unit)",
            ylabel="share of the images [% a bin]",
            title=f"{METHODS[method]}, AUROC {run.figures[method]['auroc']:.3f}",
        )
        label_logarithmic(axes, float(values.min()), float(values.max()))
    # Outside: the peaks stand at another place in every run.
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(f"Uncertainty in and out of distribution, seed {seed}")
    return figure


def label_logarithmic(axes: Axes, low: float, high: float) -> None:
    """Label a logarithmic x-axis from ``low`` to ``high`` so that labels neither overlap nor are missing."""
    axes.xaxis.set_minor_formatter(NullFormatter())
    if high < 100 * low:
        # Powers of ten alone would label one tick, or none.
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _joined(scores: Scores) -> tuple[np.ndarray, np.ndarray]:
    truth = torch.cat([torch.zeros(len(scores.inside)), torch.ones(len(scores.outside))])
    return truth.numpy(), torch.cat([scores.inside, scores.outside]).double().numpy()
