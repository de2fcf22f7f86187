"""Embeddings of clean and corrupt images, and the centroids of the classes (the document's Fig. 3, 4, 7 and 9)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.experiments.data.ndigit import NDigitData
from benchmarks.experiments.data.split import Split
from benchmarks.experiments.methods.hedged import Hedged
from benchmarks.experiments.methods.hedged_pairs import PairMethod
from benchmarks.experiments.methods.lifted import LaplaceLifted
from benchmarks.ndigit.config import Config, retrieval_data
from benchmarks.ndigit.rows import LAM, rows_of

__all__ = ["draw_all", "draw_centroids", "draw_embeddings"]

_SHOWN = 120
"""Images in a panel; with more, ellipses hide each other."""
_COLOURS = "tab10"


def draw_all(config: Config, data: NDigitData) -> None:
    """Draw those of the first seed's figures that the run folder lacks; of more than two dimensions, the first two.

    Args:
        config: Of a finished run.
        data: Its images.
    """
    from benchmarks.ndigit.run import fitted

    held, seed = retrieval_data(data, config.n), config.seeds[0]
    for row in rows_of(config.methods):
        if row.key == LAM:
            continue
        folder = config.out / f"seed{seed}"
        embeddings, centroids = (folder / f"{row.key}_{what}.png" for what in ("embeddings", "centroids"))
        if embeddings.is_file() and centroids.is_file():
            continue
        method, _ = fitted(config, row, seed, held)
        draw_embeddings(method, {"clean": data.seen_clean, "corrupt": data.seen_corrupt}, row.title, embeddings)
        draw_centroids(method, data.seen_clean, config.n, row.title, centroids)


def draw_embeddings(method: PairMethod | LaplaceLifted, parts: dict[str, Split], title: str, path: Path) -> None:
    """Draw images as ellipses of one standard deviation, or as points, one panel for each part.

    Components of a mixture are joined by a line to their mean. Colours are the first digit; grey numbers are the
    centroids of the classes of the first part.

    Args:
        method: Fitted.
        parts: Images by title; the same rows of each are shown.
        title: Above the panels.
        path: PNG file to write.
    """
    from matplotlib import pyplot as plt
    from matplotlib.patches import Ellipse

    figure, axes = plt.subplots(1, len(parts), figsize=(6 * len(parts), 6), sharex=True, sharey=True, squeeze=False)
    centres, classes = _centroids(method, next(iter(parts.values())))
    digits = len(str(int(classes.max())))
    for axis, (name, split) in zip(axes[0], parts.items(), strict=True):
        few = split.take(torch.arange(min(_SHOWN, len(split))))
        colours = plt.get_cmap(_COLOURS)(few.targets.numpy() // 10 ** (digits - 1) % 10)
        means, variances = _gaussians(method, few)
        for mean, variance, colour in zip(means.numpy(), variances.numpy(), colours, strict=True):
            middle = mean.mean(0)
            for one, spread in zip(mean, 2 * np.sqrt(variance), strict=True):
                if spread.max() > 0:
                    axis.add_patch(Ellipse(tuple(one[:2]), *spread[:2], facecolor=(*colour[:3], 0.1), edgecolor=colour))
                axis.plot(*one[:2], ".", color=colour, markersize=3)
                if len(mean) > 1:
                    axis.plot(*np.stack([one, middle])[:, :2].T, color=colour, linewidth=0.5)
        if len(classes) <= 100:
            for centre, label in zip(centres.numpy(), classes.tolist(), strict=True):
                axis.annotate(f"{label:0{digits}d}", centre[:2], color="0.5", fontsize=7, ha="center", va="center")
        axis.set_title(f"{name}, {len(few)} images")
        axis.set_aspect("equal")
        axis.set_xlabel("first dimension")
    axes[0][0].set_ylabel("second dimension")
    figure.suptitle(f"{title}: colour by the first digit; grey: centroids of clean images")
    _write(figure, path)


def draw_centroids(method: PairMethod | LaplaceLifted, split: Split, n: int, title: str, path: Path) -> None:
    """Draw the mean embedding of each class, coloured by its last digit and by its first.

    Args:
        method: Fitted.
        split: Images.
        n: Digits of an image.
        title: Above the panels.
        path: PNG file to write.
    """
    from matplotlib import pyplot as plt

    centres, classes = _centroids(method, split)
    figure, axes = plt.subplots(1, 2, figsize=(12, 6), sharex=True, sharey=True)
    for axis, (name, place) in zip(axes, (("last", 0), ("first", n - 1)), strict=True):
        value = classes.numpy() // 10**place % 10
        for digit in range(10):
            here = centres[torch.from_numpy(value == digit)]
            colour = plt.get_cmap(_COLOURS)(digit)
            axis.scatter(here[:, 0], here[:, 1], marker="s", s=60 if n == 2 else 15, color=colour, label=str(digit))
        axis.set_title(f"by the {name} digit")
        axis.set_aspect("equal")
        axis.set_xlabel("first dimension")
    axes[0].set_ylabel("second dimension")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="center right", title="digit")
    figure.suptitle(f"{title}: centroids of the classes, clean images")
    _write(figure, path)


def _gaussians(method: PairMethod | LaplaceLifted, split: Split) -> tuple[Tensor, Tensor]:
    """Means and variances (N, C, D); variance 0 for points."""
    if isinstance(method, Hedged):
        return method.mixtures(split)
    mean = method.predict(split).mean.unsqueeze(1)
    return mean, torch.zeros_like(mean)


def _centroids(method: PairMethod | LaplaceLifted, split: Split) -> tuple[Tensor, Tensor]:
    """Mean embedding of each class, and the classes."""
    classes, rows = split.targets.unique(return_inverse=True)
    mean = method.predict(split).mean
    total = torch.zeros(len(classes), mean.shape[1]).index_add(0, rows, mean)
    return total / rows.bincount()[:, None], classes


def _write(figure: Any, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(figure)
