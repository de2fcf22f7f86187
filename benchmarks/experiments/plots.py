"""Plots of one seed with all its finished methods, where each score is shown for the question that it answers.

Of the paper's: calibration curves (figure 6), ROC (7), images of lowest and highest uncertainty (8, 9), sparsification
(10). A run draws them at its end; ``python -m benchmarks.results_plots --results RUN`` draws them again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # files only: no display is needed, nor opened
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.experiments.data import RetrievalData
from benchmarks.experiments.plan import NOVELTY, OWN, known_rows, score_titles
from contrastive_curvature import metrics

_SHOWN = 10
"""Images in a row."""
_STYLES = [{"color": f"C{number}", "linestyle": style} for style in ("-", "--", "-.", ":") for number in range(10)]


def draw_all(run: Path, data: RetrievalData, table: str, seed: int, out: Path | None = None) -> None:
    """Draw what a seed of a run has so far into a folder, by default ``plots/`` of the run's, as PNG."""
    out = run / "plots" if out is None else out
    out.mkdir(parents=True, exist_ok=True)
    found = []
    for row in known_rows(table):
        path = run / f"seed{seed}" / f"{row.key}.json"
        if path.is_file() and "failed" not in json.loads(path.read_text(encoding="utf-8")):
            found.append((row, torch.load(path.with_suffix(".pt"), map_location="cpu", weights_only=True)))
    with plt.rc_context({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "figure.dpi": 130}):
        for name, figure in _figures(found, data, table, seed):
            figure.savefig(out / f"{name}.png", bbox_inches="tight")
            plt.close(figure)


def _figures(found: list[Any], data: RetrievalData, table: str, seed: int) -> Iterator[tuple[str, Figure]]:
    figures = {
        name: plt.subplots(figsize=(9.5, 6), layout="constrained") for name in ("roc", "sparsification", "votes")
    }
    (_, roc), (_, sparsification), (_, votes) = figures.values()
    styles = iter(_STYLES)
    for row, curves in found:
        for name, title in score_titles(table, row).items():
            if name in curves["scores"]:
                style = next(styles)
                # Of a method with two scores, that which belongs into plots of detection, or of retrieval.
                two = name == OWN and NOVELTY in curves["scores"]
                if data.ood is not None:
                    _roc(roc, *curves["scores"][NOVELTY if two else name], f"{title}{', novelty' * two}", style)
                inside, label = curves["scores"][name][0], f"{title}{', uncertainty' * two}"
                _sparsification(sparsification, inside, curves["precision_at_1"], label, style)
        if curves["calibration"] is not None:
            confidence, accuracy, count, error = curves["calibration"]
            label = f"{row.title} ({error:.3f})"
            votes.plot(confidence[count > 0].numpy(), accuracy[count > 0].numpy(), marker="o", label=label)
        if row.method in ("laplace_posthoc", "laplace_online", "pfe") and data.head is None:  # features are no images
            yield f"images_{row.key}", draw_images(data, curves, f"{row.title}, seed {seed}")
    for axes in (roc, votes):
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, alpha=0.5)
        axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal")
    roc.set(xlabel=f"fraction of {data.title} that is flagged", ylabel=f"fraction of {data.ood_title} that is flagged")
    roc.set_title(f"Out-of-distribution detection, seed {seed}")
    sparsification.set(xlabel="most uncertain queries removed [%]", ylabel="mAP@1 of the queries that remain")
    sparsification.set_title(f"Sparsification, {data.title}, seed {seed}")
    votes.set(xlabel="confidence: fraction of samples that vote with the majority", ylabel="accuracy of the majority")
    votes.set_title(f"Calibration of retrieval, {data.title}, seed {seed}")
    legends = {"roc": "flagged by (AUROC)", "sparsification": "removed by (AUSC)", "votes": "method (ECE)"}
    for name, (figure, axes) in figures.items():
        if axes.get_legend_handles_labels()[1]:
            axes.legend(title=legends[name], loc="center left", bbox_to_anchor=(1.01, 0.5))
            yield name, figure


def _roc(axes: Axes, inside: Tensor, outside: Tensor, title: str, style: dict[str, str]) -> None:
    from sklearn.metrics import roc_curve

    truth = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))])
    false, true, _ = roc_curve(truth.numpy(), torch.cat([inside, outside]).double().numpy())
    axes.plot(false, true, label=f"{title} ({metrics.auroc(inside, outside):.3f})", **style)


def _sparsification(axes: Axes, inside: Tensor, precision: Tensor, title: str, style: dict[str, str]) -> None:
    removed, performance = (part.numpy() for part in metrics.sparsification_curve(inside, precision))
    # The last few queries are an average of almost nothing, and would set the scale.
    kept = max(1, len(performance) * 97 // 100)
    label = f"{title} ({metrics.ausc(inside, precision):.3f})"
    axes.plot(100 * removed[:kept], performance[:kept], label=label, **style)


def draw_images(data: RetrievalData, curves: dict[str, Any], title: str) -> Figure:
    """Draw the ten images of lowest and of highest uncertainty in distribution, and of novelty out of it.

    In distribution a red caption marks a wrong nearest neighbour (paper, figures 8 and 9).
    """
    novelty = NOVELTY if NOVELTY in curves["scores"] else OWN
    sets = [(data.title, data.test, curves["scores"][OWN][0])]
    if data.ood is not None:
        sets.append((data.ood_title, data.ood, curves["scores"][novelty][1]))
    lines = 2 * len(sets)
    figure, grid = plt.subplots(lines, _SHOWN, figsize=(1.15 * _SHOWN, 1.75 * lines), layout="constrained")
    every = iter(grid)
    for name, split, values in sets:
        for end, descending in (("lowest", False), ("highest", True)):
            line = next(every)
            rows = values.argsort(descending=descending)[:_SHOWN].tolist()
            for axes, row, image in zip(line, rows, split.images(rows), strict=False):
                pixels = image.movedim(0, -1).numpy()  # one channel, or three
                axes.imshow((pixels - pixels.min()) / (pixels.max() - pixels.min()), cmap="gray")
                axes.set(xticks=[], yticks=[])
                axes.grid(False)
                wrong = split is data.test and float(curves["precision_at_1"][row]) == 0
                label = f"{data.classes[int(split.targets[row])]}\n" if split is data.test and data.classes else ""
                axes.set_xlabel(f"{label}{values[row]:.2g}", fontsize=7, color="C3" if wrong else "black")
            line[0].set_ylabel(f"{name},\n{end}", fontsize=8)
    figure.suptitle(
        f"Most and least certain images: {title}\nbelow each: its score; red: the nearest neighbour is wrong"
    )
    return figure
