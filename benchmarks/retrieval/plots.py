"""Plots of one seed with all its finished methods: ROC, calibration, sparsification, histograms, images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # files only: no display is needed, nor opened

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from benchmarks.data import RetrievalData
from benchmarks.retrieval.evaluate import OWN, Scores
from benchmarks.retrieval.pictures import draw_images
from benchmarks.retrieval.plan import Row, known_rows
from benchmarks.retrieval.store import Curves, load_curves
from contrastive_curvature import metrics
from contrastive_curvature.demo.plots import label_logarithmic

__all__ = ["draw_all"]

_WITH_IMAGES = ("laplace_posthoc", "laplace_online", "pfe")
_STYLES = ("-", "--", "-.", ":")
_INSIDE, _OUTSIDE = "C0", "C3"

Found = dict[str, tuple[Row, Curves]]


def draw_all(out: Path, data: RetrievalData, table: int, seed: int) -> None:
    """Draw what a seed has so far into ``plots/`` of the run folder, as PNG.

    Args:
        out: Run folder.
        data: The images.
        table: 1 to 4.
        seed: The seed.

    Raises:
        InputError: A cell's curves are damaged.
    """
    folder = out / "plots"
    folder.mkdir(exist_ok=True)
    found: Found = {
        row.key: (row, curves)
        for row in known_rows(table)
        if (curves := load_curves(out, seed, row.key, len(data.test))) is not None
    }
    with plt.rc_context({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "figure.dpi": 130}):
        for name, figure in _figures(data, found, seed):
            figure.savefig(folder / f"{name}.png", bbox_inches="tight")
            plt.close(figure)


def _figures(data: RetrievalData, found: Found, seed: int) -> Iterator[tuple[str, Figure]]:
    scored = {key: (row, curves) for key, (row, curves) in found.items() if OWN in curves.scores}
    voted = {key: (row, curves) for key, (row, curves) in found.items() if curves.calibration is not None}
    if scored:
        yield "sparsification", _sparsification(data, scored, seed)
    if scored and data.ood is not None:
        yield "roc", _roc(data, scored, seed)
        yield "histograms", _histograms(data, scored, seed)
    if voted:
        yield "calibration", _calibration(data, voted, seed)
    for key, (row, curves) in scored.items():
        if row.method in _WITH_IMAGES:
            yield f"images_{key}", draw_images(data, curves, f"{row.title}, seed {seed}")


def _roc(data: RetrievalData, found: Found, seed: int) -> Figure:
    from sklearn.metrics import roc_curve

    figure, axes = plt.subplots(figsize=(9.5, 6), layout="constrained")
    for (row, curves), style in zip(found.values(), _styles(), strict=False):
        truth, values = _joined(curves.scores[OWN])
        false, true, _ = roc_curve(truth, values)
        axes.plot(false, true, label=f"{row.title} ({_auroc(curves.scores[OWN]):.3f})", **style)
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, alpha=0.5, label="chance (0.500)")
    axes.set(
        xlabel=f"share of {data.title} that is flagged (false positives)",
        ylabel=f"share of {data.ood_title} that is flagged (true positives)",
        title=f"Out-of-distribution detection, seed {seed}",
        aspect="equal",
    )
    axes.legend(title="flagged by (AUROC)", loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _sparsification(data: RetrievalData, found: Found, seed: int) -> Figure:
    figure, axes = plt.subplots(figsize=(9.5, 5), layout="constrained")
    lowest = 1.0
    for (row, curves), style in zip(found.values(), _styles(), strict=False):
        score, precision = curves.scores[OWN].inside, curves.precision_at_1
        removed, performance = (part.numpy() for part in metrics.sparsification_curve(score, precision))
        axes.plot(100 * removed, performance, label=f"{row.title} ({metrics.ausc(score, precision):.3f})", **style)
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
    figure, axes = plt.subplots(figsize=(9.5, 5.5), layout="constrained")
    for (row, curves), style in zip(found.values(), _styles(), strict=False):
        bins = curves.calibration
        if bins is not None:
            full = bins.count > 0
            label = f"{row.title} ({bins.expected_calibration_error:.3f})"
            axes.plot(bins.confidence[full], bins.accuracy[full], marker="o", markersize=4, label=label, **style)
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, alpha=0.5, label="perfect")
    axes.set(
        xlabel="confidence: share of samples that vote with the majority",
        ylabel="accuracy of the majority vote",
        title=f"Calibration of retrieval, {data.title}, seed {seed}",
        xlim=(0, 1.02),
        ylim=(0, 1.02),
        aspect="equal",
    )
    axes.legend(title="method (ECE)", loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _histograms(data: RetrievalData, found: Found, seed: int) -> Figure:
    columns = min(4, len(found))
    lines = -(-len(found) // columns)
    size = (4 * columns, 3.2 * lines + 0.6)
    figure, grid = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    for axes, (row, curves) in zip(grid.flat, found.values(), strict=False):
        truth, values = _joined(curves.scores[OWN])
        # Below a decade a logarithmic axis has no tick that could be read.
        wide = 0 < 10 * values.min() < values.max()
        edges = np.geomspace(*_range(values), 51) if wide else np.linspace(*_range(values), 51)
        for kind, colour, name in ((0, _INSIDE, data.title), (1, _OUTSIDE, data.ood_title)):
            part = values[truth == kind]
            # Shares, not densities: on a logarithmic axis a density has no unit that one could read.
            axes.hist(
                part, bins=edges, weights=np.full(len(part), 100 / len(part)), color=colour, alpha=0.55, label=name
            )
        axes.set_title(f"{row.title}\nAUROC {_auroc(curves.scores[OWN]):.3f}", fontsize=9)
        axes.set(xscale="log" if wide else "linear", ylabel="images [% a bin]")
        if wide:
            label_logarithmic(axes, float(values.min()), float(values.max()))
    for axes in grid.flat[len(found) :]:
        axes.set_axis_off()
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(f"Each method's own uncertainty, seed {seed}")
    return figure


def _styles() -> Iterator[dict[str, Any]]:
    for style in _STYLES:
        for number in range(10):
            yield {"color": f"C{number}", "linestyle": style}


def _range(values: np.ndarray) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    # One value for all images still needs a bin of some width.
    return (low, high) if high > low else (low - abs(low) / 2 - 1e-12, high + abs(high) / 2 + 1e-12)


def _auroc(scores: Scores) -> float:
    inside, outside = _parts(scores)
    return metrics.auroc(inside, outside)


def _joined(scores: Scores) -> tuple[np.ndarray, np.ndarray]:
    inside, outside = _parts(scores)
    truth = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))])
    return truth.numpy(), torch.cat([inside, outside]).double().numpy()


def _parts(scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    if scores.outside is None:
        msg = "drawn only where there are images out of distribution"
        raise RuntimeError(msg)
    return scores.inside, scores.outside
