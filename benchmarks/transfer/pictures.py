"""The most and the least certain faces and sentences, by both scores: a plot of thumbnails and a page of text.

``python -m benchmarks.transfer.pictures`` reads the scores that ``python -m benchmarks.transfer`` left beside its
feature files, and writes into ``--out``. The faces are pictures of real people: the plot is not for publication.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.transfer.markdown import head, line
from contrastive_curvature.errors import InputError, expected

__all__ = ["draw_extremes", "extremes", "main", "read_scores", "text_page"]

SCORES = ("uncertainty", "novelty")
FACES, TEXT = "faces", "clinc150-64-supcon"
_SHOWN = 10
_POSTERIOR = "kron_lowrank"


def extremes(score: NDArray[np.floating], n: int = _SHOWN) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the n lowest scores, ascending, and of the n highest, descending."""
    order = np.argsort(score, kind="stable")
    return order[:n], order[::-1][:n]


def read_scores(cache: Path, name: str, which: str) -> dict[str, NDArray[np.float32]]:
    """The two scores of the inputs of one encoder.

    Args:
        cache: Folder of the feature files.
        name: Of the encoder.
        which: ``"test"``, or the name of another set of inputs.

    Returns:
        Shape (N,) for each of :data:`SCORES`.

    Raises:
        InputError: The encoder has not been judged.
    """
    path = cache / name / "scores.npz"
    if not path.is_file():
        hint = f"Run python -m benchmarks.transfer --only {name} first."
        raise InputError(expected("--cache", f"the scores {path}", "no such file", hint))
    with np.load(path) as content:
        return {score: content[f"{_POSTERIOR}/{score}:{which}"] for score in SCORES}


def draw_extremes(rows: Sequence[tuple[str, Sequence[NDArray[np.uint8]], Sequence[str]]], title: str) -> Figure:
    """Draw rows of thumbnails.

    Args:
        rows: What a row shows, its images (H, W, 3), and what stands below each.
        title: Of the figure.
    """
    width = max(len(images) for _, images, _ in rows)
    figure = Figure(figsize=(1.05 * width + 1.2, 1.5 * len(rows) + 0.6), layout="constrained")
    axes = figure.subplots(len(rows), width, squeeze=False)
    for line_of_axes, (label, images, below) in zip(axes, rows, strict=True):
        for axis in line_of_axes:
            axis.set_axis_off()
        for axis, image, text in zip(line_of_axes, images, below, strict=False):
            axis.imshow(image)
            axis.set_title(text, fontsize=7, y=-0.22)
        line_of_axes[0].text(
            -0.25, 0.5, label, transform=line_of_axes[0].transAxes, ha="right", va="center", fontsize=8
        )
    figure.suptitle(title, fontsize=10)
    return figure


def text_page(groups: Sequence[tuple[str, Sequence[str], NDArray[np.floating]]]) -> str:
    """A table of sentences for each group: its title, the sentences, and the score of each."""
    parts = []
    for title, sentences, score in groups:
        table = [
            *head(["score", "sentence"]),
            *(line([f"{s:.3g}", text]) for text, s in zip(sentences, score, strict=True)),
        ]
        parts.append("\n".join([f"## {title}", "", *table, ""]))
    return "\n".join(["# The most and the least certain sentences", "", *parts])


def _faces(cache: Path, data_root: Path, out: Path) -> Path:
    # Pillow and the data set are needed here alone.
    from benchmarks.experiments.data.lfw import load_lfw
    from benchmarks.experiments.data.options import LoadOptions
    from benchmarks.transfer.recipes.faces import face_images

    test = load_lfw(data_root, LoadOptions()).test
    with np.load(cache / FACES / "scores.npz") as content:
        right = content["right"]
    rows = []
    for name, score in read_scores(cache, FACES, "test").items():
        for kind, chosen in zip(("lowest", "highest"), extremes(score), strict=True):
            below = [f"{score[row]:.2f}" + ("" if right[row] == 1 else " (no match)") for row in chosen]
            rows.append((f"{kind}\n{name}", face_images(test, chosen), below))
    figure = draw_extremes(rows, "Faces of LFW, people who are not in training; no match: wrong, or no second image")
    path = out / "faces.png"
    figure.savefig(path, dpi=120)
    return path


def _text(cache: Path, data_root: Path, out: Path) -> Path:
    from benchmarks.transfer.recipes.queries import read_queries

    queries = read_queries(data_root)
    groups = []
    for which, texts, about in (
        ("test", queries.texts["test"], "of a known intent"),
        ("unknown_outofscope", queries.beyond, "out of scope"),
    ):
        for name, score in read_scores(cache, TEXT, which).items():
            for kind, chosen in zip(("lowest", "highest"), extremes(score), strict=True):
                groups.append((f"{kind} {name}, {about}", [texts[row] for row in chosen], score[chosen]))
    path = out / "text.md"
    path.write_text(text_page(groups), encoding="utf-8")
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    mpl.use("agg")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer.pictures", description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="folder of the feature files")
    parser.add_argument("--data-root", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--out", type=Path, default=Path("runs/pictures"), help="folder for the pictures")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    for draw in (_faces, _text):
        print(draw(given.cache, given.data_root, given.out))


if __name__ == "__main__":
    main()
