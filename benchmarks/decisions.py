"""What ``cc.Retriever`` decides: digits that it knows, digits that it was never shown, and pieces of photographs.

    python -m benchmarks.decisions [--out FOLDER]

An encoder is trained on the digits 0 to 7 of scikit-learn, in seconds; a third of them is held out for the limits, and
a third is asked. It writes ``decisions.png`` and ``decisions.md``, and needs no download. The encoder was chosen among
three for its picture: this is a demonstration, and the evidence is ``benchmarks.transfer``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.datasets import load_digits, load_sample_images
from torch import nn

import contrastive_curvature as cc
from benchmarks.style import BLUE, ORANGE, finish, subplots

OUT = Path("runs/decisions")
COLOURS = {"answered right": BLUE, "answered wrong": ORANGE, "unsure": "#bbbbbb", "unknown": "#f0e442"}


def photographs(count: int) -> NDArray[np.float32]:
    """Return pieces of scikit-learn's two photographs, at the size and range of its digits, shape (count, 64)."""
    random = np.random.default_rng(0)
    grey = [
        image.mean(2)[: 8 * (image.shape[0] // 8), : 8 * (image.shape[1] // 8)] for image in load_sample_images().images
    ]
    tiles = np.concatenate([part.reshape(part.shape[0] // 8, 8, -1, 8).swapaxes(1, 2).reshape(-1, 64) for part in grey])
    tiles = tiles - tiles.min(1, keepdims=True)
    tiles = tiles[tiles.max(1) > 30]
    return (random.permutation(tiles)[:count] / tiles.max(1, keepdims=True)[:count]).astype("float32")


def trained(x: NDArray[np.float32], y: NDArray[np.int64]) -> nn.Module:
    """Train a small encoder with SupCon."""
    torch.manual_seed(0)
    encoder, loss = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)), cc.SupConLoss(0.2)
    optimizer = torch.optim.Adam(encoder.parameters(), 2e-3)
    for _ in range(15):
        optimizer.zero_grad()
        loss(encoder(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
    return encoder


def shares(answers: cc.Answers, labels: NDArray[np.int64] | None) -> dict[str, float]:
    """Return the share of each decision; without labels every answer is wrong."""
    answered = answers.decision == "answer"
    right = answered & (False if labels is None else answers.label == labels)
    parts = (right, answered & ~right, answers.decision == "unsure", answers.decision == "unknown")
    return {name: float(part.mean()) for name, part in zip(COLOURS, parts, strict=True)}


def picture(rows: dict[str, dict[str, float]], promise: str) -> Figure:
    """Draw one bar a kind of query."""
    figure, (axes,) = subplots(8, 2.8)
    start = dict.fromkeys(rows, 0.0)
    for name, colour in COLOURS.items():
        widths = [row[name] for row in rows.values()]
        axes.barh(list(rows), widths, left=list(start.values()), color=colour, label=name, edgecolor="white")
        for kind, width in zip(rows, widths, strict=True):
            if width > 0.03:
                axes.text(start[kind] + width / 2, kind, f"{width:.0%}", ha="center", va="center", fontsize=9)
            start[kind] += width
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the queries", xticks=[0, 0.25, 0.5, 0.75, 1])
    axes.set_title(promise, fontsize=9, loc="left")
    finish(axes, columns=4)
    return figure


def main() -> None:
    """Fit, ask, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=OUT, help="where the table and the picture go (default: %(default)s)"
    )
    out = parser.parse_args().out
    x, y = load_digits(return_X_y=True)
    x, known = (x / 16).astype("float32"), y < 8
    part = np.random.default_rng(0).permutation(len(x)) % 3
    train, held, test = (known & (part == k) for k in range(3))
    retriever = cc.Retriever(trained(x[train], y[train]), wrong_answers=0.02, false_matches=0.05, false_alarms=0.02)
    retriever.fit(x[train], y[train], held_out=(x[held], y[held]), train=trained)
    rows = {
        "digits 0 to 7": shares(retriever(x[test]), y[test]),
        "digits 8 and 9, never shown": shares(retriever(x[~known]), None),
        "pieces of photographs": shares(retriever(photographs(500)), None),
    }
    lines = [f"| queries | {' | '.join(COLOURS)} |", "|---" * 5 + "|"]
    lines += [
        f"| {kind} | {' | '.join(f'{100 * share:.1f} %' for share in row.values())} |" for kind, row in rows.items()
    ]
    table = "\n".join([str(retriever), "", *lines])
    print(table)
    out.mkdir(parents=True, exist_ok=True)
    (out / "decisions.md").write_text(table + "\n")
    asked = (
        "asked for, of digits 0 to 7: at most 2 % of the answers wrong, 2 % false alarms,\n"
        "5 % false matches where the gallery lacks the digit; trained again with digits left out"
    )
    picture(rows, asked).savefig(out / "decisions.png", dpi=150)


if __name__ == "__main__":
    main()
