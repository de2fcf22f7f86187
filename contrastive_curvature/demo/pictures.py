"""Pictures of the embeddings, and of the images that the encoder is most and least sure of."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor

from contrastive_curvature.demo.data import DemoData
from contrastive_curvature.demo.evaluate import Evaluation
from contrastive_curvature.demo.methods import CLOSED
from contrastive_curvature.hessian.sphere import normalize

__all__ = ["draw_embeddings", "draw_images", "project"]

_SHOWN = 10
"""Images in a row."""
_DOTS = 3000
"""Points drawn of each set: more would hide each other."""


def project(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor, str]:
    """Bring unit embeddings onto paper.

    Args:
        inside: Shape (N, D).
        outside: Shape (M, D).

    Returns:
        Two coordinates a point for both, and what they are: longitude and latitude for D = 3, the embeddings themselves
        for D = 2, else the two principal components of ``inside``.
    """
    dim = inside.shape[1]
    if dim == 2:
        return inside, outside, "the unit circle"
    if dim == 3:
        on_map = [
            torch.stack([torch.atan2(u[:, 1], u[:, 0]), torch.asin(u[:, 2].clamp(-1, 1))], 1) for u in (inside, outside)
        ]
        return on_map[0], on_map[1], "the whole sphere, equal areas (Mollweide)"
    mean = inside.mean(0)
    _, values, axes = torch.linalg.svd(inside - mean, full_matrices=False)
    share = float(values[:2].square().sum() / values.square().sum())
    what = f"first two principal components ({share:.0%} of the variance) of {dim} dimensions"
    return (inside - mean) @ axes[:2].T, (outside - mean) @ axes[:2].T, what


def draw_embeddings(data: DemoData, run: Evaluation, seed: int) -> Figure:
    """Draw the embeddings by class and by uncertainty, in distribution, and by uncertainty out of it.

    Args:
        data: Labels and names.
        run: What the seed gave.
        seed: For the title.

    Returns:
        The figure, three panels.
    """
    inside, outside = (normalize(z)[0][:_DOTS] for z in (run.z_inside, run.z_outside))
    flat_in, flat_out, what = project(inside, outside)
    sphere = inside.shape[1] == 3
    shape: dict[str, Any] = {"subplot_kw": {"projection": "mollweide"}} if sphere else {}
    size = (8, 11) if sphere else (7, 13)
    figure, panels = plt.subplots(3, 1, figsize=size, layout="constrained", **shape)
    scores = run.scores[CLOSED]
    both = torch.cat([scores.inside, scores.outside]).double()
    low, high = (float(both.quantile(q)) for q in (0.01, 0.99))
    scale = LogNorm(low, high)
    labels = data.test_y[:_DOTS]
    colours = plt.get_cmap("tab10")
    for number, name in enumerate(data.classes):
        chosen = labels == number
        panels[0].scatter(*flat_in[chosen].T.numpy(), s=5, color=colours(number), label=name, linewidths=0)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", markerscale=3, title="class")
    panels[0].set_title(f"in distribution ({len(flat_in):,} test images), by class")
    for axes, points, values, title in (
        (panels[1], flat_in, scores.inside, "in distribution, by uncertainty"),
        (panels[2], flat_out, scores.outside, f"out of distribution ({data.ood_name}), by uncertainty"),
    ):
        # The most uncertain last, or the others would hide them.
        order = values[:_DOTS].argsort()
        drawn = axes.scatter(
            *points[order].T.numpy(), c=values[:_DOTS][order].numpy(), s=5, cmap="viridis", norm=scale, linewidths=0
        )
        axes.set_title(title)
    # Below all three, which keeps them of one size and in one line.
    below: dict[str, Any] = {"orientation": "horizontal", "shrink": 0.8, "aspect": 40}
    # As many ticks as fit: the default labels every one of a decade's as a power.
    below |= {"ticks": LogLocator(subs=(1, 2, 5)), "format": "%g", "extend": "both"}
    bar = figure.colorbar(drawn, ax=panels, label="uncertainty, closed form (units of the raw outputs)", **below)
    bar.minorticks_off()
    _same_view(panels, flat_in, flat_out, sphere)
    figure.suptitle(f"Embeddings, seed {seed}: {what}")
    return figure


def draw_images(data: DemoData, run: Evaluation, seed: int) -> Figure:
    """Draw the most and the least certain images of both sets.

    Args:
        data: The images.
        run: What the seed gave.
        seed: For the title.

    Returns:
        The figure, four rows; in distribution a red caption marks a wrong nearest neighbour.
    """
    figure, grid = plt.subplots(4, _SHOWN, figsize=(1.15 * _SHOWN, 6.4), layout="constrained")
    scores = run.scores[CLOSED]
    rows = (
        ("in distribution,\nmost certain", data.test_x, scores.inside, False),
        ("in distribution,\nleast certain", data.test_x, scores.inside, True),
        ("out of distribution,\nmost certain", data.ood_x, scores.outside, False),
        ("out of distribution,\nleast certain", data.ood_x, scores.outside, True),
    )
    for line, (name, images, values, descending) in zip(grid, rows, strict=True):
        chosen = values.argsort(descending=descending)[:_SHOWN]
        for axes, index in zip(line, chosen.tolist(), strict=True):
            axes.imshow(images[index, 0].numpy(), cmap="gray", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
            axes.grid(False)
            caption = f"{float(values[index]):.2g}"
            wrong = False
            if images is data.test_x:
                truth, found = int(data.test_y[index]), int(run.retrieved[index])
                wrong = truth != found
                name_shown = f"{data.classes[truth]} → {data.classes[found]}" if wrong else data.classes[truth]
                caption = f"{name_shown}\n{caption}"
            axes.set_xlabel(caption, fontsize=7, color="C3" if wrong else "black")
        line[0].set_ylabel(name, fontsize=8.5)
    figure.suptitle(
        f"Most and least certain images; out of distribution: {data.ood_name}; seed {seed}\n"
        "below each: its class, → that of the nearest neighbour where it is wrong; "
        "closed-form uncertainty (units of the raw outputs)",
        fontsize=11,
    )
    return figure


def _same_view(panels: Any, inside: Tensor, outside: Tensor, sphere: bool) -> None:
    """The same frame for all panels, so that a place means the same in each."""
    for axes in panels:
        if sphere:
            axes.set(xticklabels=[], yticklabels=[])
        else:
            _frame(axes, torch.cat([inside, outside]).numpy())


def _frame(axes: Axes, points: np.ndarray) -> None:
    low, high = points.min(0), points.max(0)
    pad = 0.05 * (high - low)
    axes.set(xlabel="first coordinate", ylabel="second coordinate")
    axes.set(xlim=(low[0] - pad[0], high[0] + pad[0]), ylim=(low[1] - pad[1], high[1] + pad[1]), aspect="equal")
