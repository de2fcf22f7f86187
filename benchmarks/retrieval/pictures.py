"""The images that a method is most and least sure of (paper, Fig. 8 and 9)."""

from __future__ import annotations

from textwrap import fill

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.data import RetrievalData, Split
from benchmarks.retrieval.evaluate import OWN
from benchmarks.retrieval.store import Curves

__all__ = ["draw_images"]

_SHOWN = 10
"""Images in a row."""


def draw_images(data: RetrievalData, curves: Curves, title: str) -> Figure:
    """Draw the ten images of lowest and of highest uncertainty, in distribution and, where there are, out of it.

    Args:
        data: The images.
        curves: The method's uncertainties.
        title: Of the figure.

    Returns:
        The figure; in distribution a red caption marks a wrong nearest neighbour.
    """
    scores = curves.scores[OWN]
    sets: list[tuple[str, Split, Tensor, bool]] = [(data.title, data.test, scores.inside, True)]
    if data.ood is not None and scores.outside is not None:
        sets.append((data.ood_title, data.ood, scores.outside, False))
    size = (1.15 * _SHOWN, 2.9 * len(sets) + 0.8)
    figure, grid = plt.subplots(2 * len(sets), _SHOWN, figsize=size, layout="constrained", squeeze=False)
    number = 0
    for name, split, values, inside in sets:
        for end, descending in (("lowest", False), ("highest", True)):
            line = grid[number]
            number += 1
            chosen = values.argsort(descending=descending)[:_SHOWN].tolist()
            for axes, index, image in zip(line, chosen, split.images(chosen), strict=False):
                pixels, colours = _shown(image)
                axes.imshow(pixels, cmap=colours)
                axes.set(xticks=[], yticks=[])
                axes.grid(False)
                wrong = inside and float(curves.precision_at_1[index]) == 0
                axes.set_xlabel(f"{float(values[index]):.2g}", fontsize=7, color="C3" if wrong else "black")
            line[0].set_ylabel(f"{fill(name, 18)},\n{end}", fontsize=8)
    figure.suptitle(f"Lowest and highest uncertainty: {title}\nred: the nearest neighbour is wrong", fontsize=11)
    return figure


def _shown(image: Tensor) -> tuple[np.ndarray, str | None]:
    """Pixels in [0, 1] for matplotlib, and a colour map for images of one channel."""
    low, high = float(image.min()), float(image.max())
    if low < 0 or high > 1:
        # Normalised as ImageNet: each image is stretched to its own range, which is enough to recognise it.
        image = (image - low) / (high - low)
    return (image[0].numpy(), "gray") if len(image) == 1 else (image.permute(1, 2, 0).numpy(), None)
