"""The style of every plot of the docs: colours that the colour-blind tell apart, no box, the legend below the axes."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

BLUE, ORANGE, GREEN, PURPLE, GREY = COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#777777")


def subplots(width: float, height: float, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure of a size in inches, and the axes of a row of plots."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    return figure, list(figure.subplots(1, columns, squeeze=False, **options)[0])


def finish(axes: Axes, columns: int = 3) -> None:
    """Take the box away, and put the legend below the name of the x-axis, where no line can cross it."""
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        below = axes.transAxes + ScaledTranslation(0, -36 / 72, axes.get_figure(root=True).dpi_scale_trans)
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "bbox_transform": below}
        axes.legend(**place, ncols=columns, frameon=False, fontsize=8)
