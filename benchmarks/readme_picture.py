"""The picture of the README: what the numbers say of digits, for an encoder that was trained on 0 to 7 only.

A small encoder (64-64-8) with the contrastive loss, 60 epochs, digits of scikit-learn. Above: test images of the digits
0 to 7, those of least and of greatest ``uncertainty``. Below: ``novelty`` of these images, and of the digits 8 and 9,
which the encoder has never seen, with the threshold of ``is_known(alpha=0.05)``.

    python -m benchmarks.readme_picture [--out docs/images/digits.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

import contrastive_curvature as cc
from benchmarks.fitted_digits import fit_digits
from contrastive_curvature import metrics

OUT = Path(__file__).parent.parent / "docs" / "images" / "digits.png"
ALPHA = 0.05
_SHOWN = 12
_CALIBRATE = 400
_BLUE, _ORANGE, _GREY = "#0072b2", "#d55e00", "#555555"  # told apart by the colour-blind, too


class Scored(NamedTuple):
    """Images with what the posterior says of them."""

    images: Tensor
    labels: Tensor
    embedding: cc.EmbeddingDistribution


def score(epochs: int = 60) -> tuple[Scored, Scored, float]:
    """Train, fit and predict.

    Returns:
        Test images of known digits, images of unknown digits, and the share of wrong nearest neighbours among the
        known ones.
    """
    la, x, y, train, test, unknown = fit_digits(_CALIBRATE, epochs)
    scored = [Scored(x[rows].view(-1, 8, 8), y[rows], la(x[rows])) for rows in (test, unknown)]
    nearest = (scored[0].embedding.mu @ la(x[train]).mu.T).argmax(1)
    wrong = float((y[train][nearest] != scored[0].labels).float().mean())
    return scored[0], scored[1], wrong


def draw(known: Scored, unknown: Scored) -> Figure:
    """Draw the picture."""
    figure = Figure(figsize=(8, 3.9), layout="constrained", facecolor="white")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.25))
    order = known.embedding.uncertainty.argsort()
    for row, (title, rows) in enumerate((("most certain", order[:_SHOWN]), ("least certain", order.flip(0)[:_SHOWN]))):
        for k, i in enumerate(rows.tolist()):
            axis = above.add_subplot(2, _SHOWN, row * _SHOWN + k + 1)
            axis.imshow(known.images[i].numpy(), cmap="gray_r")
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_color("#cccccc")
            if k == 0:
                axis.set_ylabel(title.replace(" ", "\n"), rotation=0, ha="right", va="center", fontsize=9)
    above.suptitle("Known digits (0 to 7), ranked by uncertainty", fontsize=10)

    axis = below.subplots()
    scores = [group.embedding.novelty.numpy() for group in (known, unknown)]
    bins = np.linspace(min(map(np.min, scores)), np.quantile(np.concatenate(scores), 0.995), 50)
    kinds = ((_BLUE, "known: 0 to 7"), (_ORANGE, "never seen: 8 and 9"))
    for values, (colour, label) in zip(scores, kinds, strict=True):
        weights = np.full(len(values), 100 / len(values))
        axis.hist(np.clip(values, None, bins[-1]), bins, weights=weights, color=colour, alpha=0.65, label=label)
    flagged = [100 * float((~group.embedding.is_known(ALPHA)).float().mean()) for group in (known, unknown)]
    threshold = float(known.embedding.novelty[known.embedding.is_known(ALPHA)].max())
    axis.axvline(threshold, color=_GREY, linestyle="--", linewidth=1)
    right = (
        f" is_known(alpha={ALPHA}) is false →\n flags {flagged[0]:.0f} % of the known, {flagged[1]:.0f} % of the others"
    )
    axis.text(threshold, axis.get_ylim()[1] * 0.97, right, va="top", fontsize=9, color=_GREY)
    axis.set(xlabel="novelty", ylabel="share of images, %")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="center right", fontsize=9)
    return figure


def main() -> None:
    """Write the picture, and print the figures in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="where to write it (default: docs/images/digits.png)")
    parser.add_argument("--epochs", type=int, default=60, help="of training (default: 60)")
    arguments = parser.parse_args()
    known, unknown, wrong = score(arguments.epochs)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    draw(known, unknown).savefig(arguments.out, dpi=130)
    both = [group.embedding.novelty for group in (known, unknown)]
    print(f"wrong nearest neighbours: {wrong:.3f}; AUROC of novelty: {metrics.auroc(*both):.3f}")
    for alpha in (0.01, ALPHA, 0.1):
        flagged = [float((~group.embedding.is_known(alpha)).float().mean()) for group in (known, unknown)]
        print(f"alpha {alpha}: flagged {flagged[0]:.3f} of the known, {flagged[1]:.3f} of the unknown")


if __name__ == "__main__":
    main()
