"""Plots of one seed with all its finished methods, where each score is shown for the question that it answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # files only: no display is needed, nor opened

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from torch import Tensor

from benchmarks.experiments.data import RetrievalData, Split
from benchmarks.experiments.evaluate import Curves, Scores
from benchmarks.experiments.plan import ALPHAS, NOVELTY, OWN, Row, Table, known_rows, score_titles
from benchmarks.experiments.run import load_curves
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
    found = [(row, curves) for row in known_rows(table) if (curves := load_curves(out, seed, row.key)) is not None]
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
        raise RuntimeError("drawn only where there are images out of distribution")
    return one.outside


_BINS = 20


def draw_p_values(data: RetrievalData, p_values: Scores, title: str) -> Figure:
    """Draw which share of images is flagged at every threshold, and the histogram of the p-values.

    Args:
        data: Names of the data sets.
        p_values: Of the test images, and of those out of distribution.
        title: Of the figure.

    Returns:
        The figure: shares flagged over thresholds on logarithmic axes, where exchangeable images are on the diagonal;
        and a histogram, where they are flat.
    """
    parts = [(data.title, p_values.inside.numpy(), _INSIDE)]
    if p_values.outside is not None:
        parts.append((f"out: {data.ood_title}", p_values.outside.numpy(), _OUTSIDE))
    smallest = min(float(values.min()) for _, values, _ in parts)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    alphas = np.geomspace(min(smallest, ALPHAS[0]), 1, 200)
    for name, values, colour in parts:
        shares = np.searchsorted(np.sort(values), alphas, side="right") / len(values)
        left.step(alphas, shares, where="post", color=colour, label=name)
        weights = np.full(len(values), 100 / len(values))
        right.hist(values, bins=np.linspace(0, 1, _BINS + 1), weights=weights, color=colour, alpha=0.55)
    left.plot(alphas, alphas, color="black", linewidth=0.8, alpha=0.5, label="exchangeable with the calibration images")
    for number, alpha in enumerate(ALPHAS):
        style = ("--", ":")[number % 2]
        left.axvline(alpha, color="black", linewidth=1, linestyle=style, label=f"threshold \u03b1 = {alpha:g}")
    right.axvline(ALPHAS[-1], color="black", linewidth=1, linestyle=":")
    right.axhline(100 / _BINS, color="black", linewidth=0.8, alpha=0.5)
    lowest = min(1 / max(len(values) for _, values, _ in parts), smallest)
    left.set(
        xscale="log",
        yscale="log",
        xlim=(alphas[0], 1),
        ylim=(lowest, 1.15),
        xlabel="threshold \u03b1 on the p-value",
        ylabel="images flagged as unknown, p \u2264 \u03b1",
    )
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    left.xaxis.set_major_formatter(plain)
    left.yaxis.set_major_formatter(plain)
    right.set(xlabel="p-value: is this image of a known kind?", ylabel="images [% a bin]", xlim=(0, 1))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(parts) + 1 + len(ALPHAS))
    figure.suptitle(f"Conformal p-values: {title}")
    return figure


_SHOWN = 10
"""Images in a row."""
_COLOURS = 10
"""Classes that the colours of a plot can tell apart."""
_UNIT = 1e-3
"""How far from 1 the length of a unit vector may be."""


def draw_images(data: RetrievalData, curves: Curves, title: str) -> Figure:
    """Draw the ten images of lowest and of highest uncertainty, in distribution and, where there are, out of it.

    Of a method with two scores the images out of distribution are those of lowest and of highest novelty.

    Args:
        data: The images.
        curves: The method's scores.
        title: Of the figure.

    Returns:
        The figure; in distribution a red caption marks a wrong nearest neighbour.
    """
    sets: list[tuple[str, Split, Tensor, bool]] = [(data.title, data.test, curves.scores[OWN].inside, True)]
    other = NOVELTY if NOVELTY in curves.scores else OWN
    outside = curves.scores[other].outside
    if data.ood is not None and outside is not None:
        sets.append((f"out of distribution, {data.ood_title}", data.ood, outside, False))
    size = (1.15 * _SHOWN, 3.1 * len(sets) + 0.8)
    figure, grid = plt.subplots(2 * len(sets), _SHOWN, figsize=size, layout="constrained", squeeze=False)
    lines = iter(grid)
    for name, split, values, inside in sets:
        for end, descending in (("lowest", False), ("highest", True)):
            line = next(lines)
            chosen = values.argsort(descending=descending)[:_SHOWN].tolist()
            for axes, index, image in zip(line, chosen, split.images(chosen), strict=False):
                pixels, colours = _shown(image)
                axes.imshow(pixels, cmap=colours)
                axes.set(xticks=[], yticks=[])
                axes.grid(False)
                wrong = inside and float(curves.precision_at_1[index]) == 0
                label = _label(data, curves, index, wrong) if inside else ""
                shown = f"{float(values[index]):.{2 if inside else 3}g}"
                axes.set_xlabel(f"{label}{shown}", fontsize=7, color="C3" if wrong else "black")
            score = "novelty" if not inside and other == NOVELTY else "uncertainty"
            line[0].set_ylabel(f"{fill(name, 18)},\n{end}\n{score}", fontsize=8)
    named = "its class, → that of the nearest neighbour where it is wrong; " if data.classes else ""
    below = f"below each: {named}score; red: the nearest neighbour is wrong"
    figure.suptitle(f"Most and least certain images: {title}\n{below}", fontsize=11)
    return figure


def _label(data: RetrievalData, curves: Curves, index: int, wrong: bool) -> str:
    """Class of an image and, where it is another one, of the image that was retrieved."""
    if not data.classes:
        return ""
    name = data.classes[int(data.test.targets[index])]
    found = data.classes[int(data.test.targets[int(curves.nearest[index])])] if data.gallery is None else ""
    return f"{name} → {found}\n" if wrong and found else f"{name}\n"


def _shown(image: Tensor) -> tuple[np.ndarray, str | None]:
    """Pixels in [0, 1] for matplotlib, and a colour map for images of one channel."""
    low, high = float(image.min()), float(image.max())
    if low < 0 or high > 1:
        # Normalised as ImageNet: each image is stretched to its own range, which is enough to recognise it.
        image = (image - low) / (high - low)
    return (image[0].numpy(), "gray") if len(image) == 1 else (image.permute(1, 2, 0).numpy(), None)


def project(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor, str]:
    """Bring embeddings onto paper.

    Args:
        inside: Shape (N, D), all of unit length or not.
        outside: Shape (M, D).

    Returns:
        Two coordinates a point for both, and what they are: the embeddings themselves for D = 2, longitude and latitude
        for unit vectors of D = 3, else the two principal components of ``inside``.
    """
    dim = inside.shape[1]
    if dim == 2:
        return inside, outside, "the unit circle" if _on_sphere(inside) else "the plane of the embeddings"
    if dim == 3 and _on_sphere(inside):
        on_map = [
            torch.stack([torch.atan2(u[:, 1], u[:, 0]), torch.asin(u[:, 2].clamp(-1, 1))], 1) for u in (inside, outside)
        ]
        return on_map[0], on_map[1], "the whole sphere, equal areas (Mollweide)"
    mean = inside.mean(0)
    _, values, axes = torch.linalg.svd(inside - mean, full_matrices=False)
    part = float(values[:2].square().sum() / values.square().sum())
    what = f"first two principal components ({part:.0%} of the variance) of {dim} dimensions"
    return (inside - mean) @ axes[:2].T, (outside - mean) @ axes[:2].T, what


def _on_sphere(embeddings: Tensor) -> bool:
    return bool(((embeddings.norm(dim=1) - 1).abs() < _UNIT).all())


def draw_embeddings(data: RetrievalData, curves: Curves, title: str) -> Figure:
    """Draw the embeddings by uncertainty, in and out of distribution and, where there are few classes, by class.

    Args:
        data: Labels and names.
        curves: The method's embeddings and uncertainties.
        title: Of the figure.

    Returns:
        The figure, one to three panels.
    """
    inside, outside = curves.embeddings["inside"], curves.embeddings["outside"]
    sphere = inside.shape[1] == 3 and _on_sphere(inside)
    flat_in, flat_out, what = project(inside, inside[:0] if outside is None else outside)
    scores = curves.scores[OWN]
    sets = [("in distribution, by uncertainty", flat_in, scores.inside)]
    if outside is not None and scores.outside is not None:
        sets.append((f"out of distribution ({data.ood_title}), by uncertainty", flat_out, scores.outside))
    by_class = 0 < len(data.classes) <= _COLOURS
    count = len(sets) + by_class
    shape: dict[str, Any] = {"subplot_kw": {"projection": "mollweide"}} if sphere else {}
    size = (8, 3.7 * count) if sphere else (7, 4.3 * count)
    figure, grid = plt.subplots(count, 1, figsize=size, layout="constrained", squeeze=False, **shape)
    panels = list(grid.flat)
    if by_class:
        _draw_classes(panels[0], data, flat_in)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", markerscale=3, title="class")
    both = torch.cat([values for _, _, values in sets]).double()
    low, high = (float(both.quantile(q)) for q in (0.01, 0.99))
    scale = LogNorm(low, high) if low > 0 else Normalize(low, high)
    for axes, (name, points, values) in zip(panels[by_class:], sets, strict=True):
        # The most uncertain last, or the others would hide them.
        order = values[: len(points)].argsort()
        style: dict[str, Any] = {"s": 5, "cmap": "viridis", "norm": scale, "linewidths": 0}
        drawn = axes.scatter(*points[order].T.numpy(), c=values[order].numpy(), **style)
        axes.set_title(name)
    # Below all panels, which keeps them of one size and in one line.
    below: dict[str, Any] = {"orientation": "horizontal", "shrink": 0.8, "aspect": 40, "extend": "both"}
    if low > 0:
        # As many ticks as fit: the default labels every one of a decade's as a power.
        below |= {"ticks": LogLocator(subs=(1, 2, 5)), "format": "%g"}
    figure.colorbar(drawn, ax=panels, label="uncertainty", **below).minorticks_off()
    for axes in panels:
        if sphere:
            axes.set(xticklabels=[], yticklabels=[])
        else:
            _frame(axes, torch.cat([flat_in, flat_out]).numpy())
    figure.suptitle(f"Embeddings, {title}:\n{what}")
    return figure


def _draw_classes(axes: Axes, data: RetrievalData, points: Tensor) -> None:
    labels = data.test.targets[: len(points)]
    colours = plt.get_cmap("tab10")
    for number, name in enumerate(data.classes):
        axes.scatter(*points[labels == number].T.numpy(), s=5, color=colours(number), label=name, linewidths=0)
    axes.set_title(f"in distribution ({len(points):,} test images), by class")


def _frame(axes: Axes, points: np.ndarray) -> None:
    """The same frame for all panels, so that a place means the same in each."""
    low, high = points.min(0), points.max(0)
    pad = 0.05 * (high - low)
    axes.set(xlabel="first coordinate", ylabel="second coordinate")
    axes.set(xlim=(low[0] - pad[0], high[0] + pad[0]), ylim=(low[1] - pad[1], high[1] + pad[1]), aspect="equal")
