"""The images that a method is most and least sure of (paper, Fig. 8 and 9), and a map of its embeddings."""

from __future__ import annotations

from textwrap import fill
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor

from benchmarks.experiments.data import RetrievalData, Split
from benchmarks.experiments.plan import NOVELTY, OWN
from benchmarks.experiments.store import Curves

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
