"""The picture of the README: which questions to answer with the nearest neighbour, and which to refuse.

A small text encoder, trained with the supervised contrastive loss on the 15,000 training questions of CLINC150 with
150 intents. The answer to a question is the intent of its nearest training question. Left: wrong answers among those
given, while the least certain questions are left out. Right: ``novelty`` of test questions and of questions that have
none of the intents, with the threshold of ``is_known(alpha=0.05)``, calibrated with the validation questions.

    python -m benchmarks.readme_picture [--data ../shared/data] [--out docs/images/sentences.png]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from laplace import Laplace
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import contrastive_curvature as cc
from benchmarks.style import BLUE, GREY, ORANGE, finish, subplots
from benchmarks.transfer.recipes.queries import read_queries
from benchmarks.transfer.recipes.text_encoder import make_text_encoder, parts_of
from benchmarks.transfer.train import Training, seeded, train
from contrastive_curvature import metrics

OUT = Path(__file__).parent.parent / "docs" / "images" / "sentences.png"
ALPHA = 0.05
_DIM, _ROWS = 64, 1000


class Scored(NamedTuple):
    """What is known of the test questions and of those without an intent.

    Attributes:
        wrong: Whether the nearest training question has another intent, shape (N,).
        uncertainty: Of each test question, shape (N,).
        distance: One minus the cosine to the nearest training question, shape (N,).
        known: Predictions for the test questions.
        unknown: Predictions for the questions without an intent.
    """

    wrong: Tensor
    uncertainty: Tensor
    distance: Tensor
    known: cc.EmbeddingDistribution
    unknown: cc.EmbeddingDistribution


def score(data: Path, epochs: int = 15) -> Scored:
    """Train, fit, calibrate and predict."""
    queries = read_queries(data)
    parts = {part: parts_of(texts) for part, texts in queries.texts.items()}
    labels = {part: torch.from_numpy(numbers) for part, numbers in queries.labels.items()}
    with seeded(0):
        encoder = make_text_encoder(_DIM)
        training = Training(epochs=epochs, rate=3e-3, batch=256, together=4)
        train(encoder, lambda rows: parts["train"][rows], labels["train"], "supcon", training, 0)
    la = Laplace(encoder.eval(), "contrastive")
    la.fit(DataLoader(TensorDataset(parts["train"], labels["train"]), batch_size=_ROWS))
    la.optimize_prior_precision()
    la.calibrate(DataLoader(TensorDataset(parts["val"], labels["val"]), batch_size=_ROWS))
    gallery, known, unknown = (
        cc.EmbeddingDistribution.cat([la(rows) for rows in inputs.split(_ROWS)])
        for inputs in (parts["train"], parts["test"], parts_of(queries.beyond))
    )
    cosine, nearest = (known.mu @ gallery.mu.T).max(1)
    return Scored(labels["train"][nearest] != labels["test"], known.uncertainty, 1 - cosine, known, unknown)


def errors(wrong: Tensor, by: Tensor) -> Tensor:
    """Share of wrong answers among the k surest questions, for every k, shape (N,)."""
    return wrong[by.argsort()].double().cumsum(0) / torch.arange(1, len(wrong) + 1)


def draw(scored: Scored) -> Figure:
    """Draw the picture."""
    figure, (left, right) = subplots(9, 3.5, 2)
    left_out = 1 - np.arange(1, len(scored.wrong) + 1) / len(scored.wrong)
    shown = left_out <= 0.5
    for by, colour, label in (
        (scored.distance, GREY, "by the cosine to the neighbour"),
        (scored.uncertainty, BLUE, "by uncertainty"),
    ):
        left.plot(100 * left_out[shown], 100 * errors(scored.wrong, by).numpy()[shown], color=colour, label=label)
    left.set(xlabel="least certain questions left out, %", ylabel="wrong among the answers, %", ylim=(0, None))
    left.set_title("Leave out the least certain", fontsize=10)

    scores = [group.novelty.numpy() for group in (scored.known, scored.unknown)]
    bins = np.linspace(np.quantile(scores[0], 0.001), np.quantile(scores[1], 0.99), 50)
    kinds = ((BLUE, "one of the 150 intents"), (ORANGE, "none of them"))
    for values, (colour, label) in zip(scores, kinds, strict=True):
        weights = np.full(len(values), 100 / len(values))
        right.hist(np.clip(values, bins[0], bins[-1]), bins, weights=weights, color=colour, alpha=0.65, label=label)
    threshold = float(scored.known.novelty[scored.known.is_known(ALPHA)].max())
    right.axvline(threshold, color=GREY, linestyle="--", linewidth=1)
    refused = [f"{share:.1f} %" for share in (flagged(scored.known), flagged(scored.unknown))]
    text = f" is_known(alpha={ALPHA})\n refuses {refused[0]} | {refused[1]} →"
    right.text(threshold, right.get_ylim()[1], text, va="top", fontsize=9, color=GREY)
    right.set(xlabel="novelty", ylabel="share of questions, %")
    right.set_title("Refuse what the encoder does not know", fontsize=10)
    for axes in (left, right):
        finish(axes)
    return figure


def flagged(group: cc.EmbeddingDistribution, alpha: float = ALPHA) -> float:
    """Per cent of embeddings that are not known."""
    return 100 * float((~group.is_known(alpha)).double().mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the picture, and print the figures in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder of clinc150/data_full.json.gz"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="where to write it (default: docs/images/sentences.png)")
    parser.add_argument("--epochs", type=int, default=15, help="of training (default: 15)")
    given = parser.parse_args(arguments)
    scored = score(given.data, given.epochs)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, by in (("uncertainty", scored.uncertainty), ("cosine", scored.distance)):
        curve = errors(scored.wrong, by)
        told = ", ".join(
            f"{100 * float(curve[int(share * len(curve)) - 1]):.1f} % of {share:.0%}" for share in (1, 0.9, 0.8)
        )
        auroc = metrics.auroc(by[~scored.wrong], by[scored.wrong])
        lines.append(f"wrong answers by {name}: {told}; AUROC {auroc:.3f}")
    lines.append(f"AUROC of novelty: {metrics.auroc(scored.known.novelty, scored.unknown.novelty):.3f}")
    for alpha in (0.01, ALPHA, 0.1):
        known, unknown = (flagged(group, alpha) for group in (scored.known, scored.unknown))
        lines.append(f"alpha {alpha}: refused {known:.1f} %, unknown {unknown:.1f} %")
    # The picture carries its figures, with which a test compares the caption in the README.
    draw(scored).savefig(given.out, dpi=130, metadata={"Description": "\n".join(lines)})
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
