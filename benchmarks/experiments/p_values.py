"""One threshold: conformal p-values of known and unknown images, as a plot."""

from __future__ import annotations

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.experiments.data import RetrievalData
from benchmarks.experiments.evaluate import Scores
from benchmarks.experiments.plan import ALPHAS

_INSIDE, _OUTSIDE = "C0", "C3"
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
