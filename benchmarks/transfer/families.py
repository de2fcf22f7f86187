"""Means over the encoders of one data set and trunk, from the committed results: the table of docs/results.md.

``python -m benchmarks.transfer.families`` prints it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import table
from benchmarks.transfer.results import Result, read_results

FAMILIES = {
    "cifar10-resnet56": "CIFAR-10, pretrained ResNet-56",
    "cifar10-resnet-": "CIFAR-10, small ResNet",
    "cifar10-paper": "CIFAR-10, the paper's network",
    "faces": "faces (LFW), pretrained MobileFaceNet",
    "clinc150": "sentences (CLINC150)",
    "omniglot": "drawings (Omniglot), unseen alphabets",
    "fashionmnist": "Fashion-MNIST, the paper's network",
    "mnist": "MNIST, the paper's network",
}
"""Beginning of an encoder's name, and what stands in the table."""

RIGHT = {
    "default/uncertainty": "`uncertainty`",
    "norm": "minus norm",
    "vmf": "class density",
    "match": "distance to match",
    "knn_votes": "votes of 10-NN",
    "gated_labels": "`RetrievalUncertainty` with labels",
}
"""Scores for whether the nearest neighbour is right."""

KNOWN = {
    "default/novelty": "`novelty`",
    "norm": "minus norm",
    "knn_embedding": "10-NN, embedding",
    "knn_features": "10-NN, features",
}
"""Scores for whether an input is of a known kind."""

RIVALS_RIGHT = {"norm": "minus norm", "vmf": "class density", "mahalanobis": "Mahalanobis, features"}
"""Scores of others for the same question as ``uncertainty``: without a gallery."""

RIVALS_KNOWN = {
    **RIVALS_RIGHT,
    "knn_embedding": "10-NN, embedding",
    "knn_features": "10-NN, features",
    "match": "distance to match",
}
"""Scores of others for the same question as ``novelty``, with and without a gallery."""


def families_table(results: Sequence[Result]) -> str:
    """One line a family: mAP@1, R-AUROC of some scores, and mean AUROC over the kinds of unknown inputs of others.

    Args:
        results: As :func:`.read_results` gives them.

    Returns:
        Markdown; every figure is a mean over the encoders of the family.
    """
    names = [f"right? {title}" for title in RIGHT.values()] + [f"known? {title}" for title in KNOWN.values()]
    lines = []
    for start, title in FAMILIES.items():
        mine = [result for result in results if result["name"].startswith(start)]
        if mine:
            cells = [_mean([result["map_at_1"] for result in mine])]
            cells += [_mean([_row(result, name)["r_auroc"] for result in mine]) for name in RIGHT]
            cells += [_mean([_unknown(result, name) for result in mine]) for name in KNOWN]
            right = {
                title: statistics.mean(_row(one, row)["r_auroc"] for one in mine) for row, title in RIVALS_RIGHT.items()
            }
            known = {title: statistics.mean(_unknown(one, row) for one in mine) for row, title in RIVALS_KNOWN.items()}
            lines.append([f"{title} ({len(mine)})", *cells, _best(right), _best(known)])
    names += ["right? best other", "known? best other"]
    return table(["encoders", "mAP@1", *names], lines) + "\n"


def _best(scores: dict[str, float]) -> str:
    title = max(scores, key=lambda name: scores[name])
    return f"{scores[title]:.3f} {title}"


def _row(result: Result, name: str) -> Result:
    return result["rows"][name.replace("default/", f"{result['default']}/")]


def _unknown(result: Result, name: str) -> float:
    return statistics.mean(kind["auroc"] for kind in _row(result, name)["unknown"].values())


def _mean(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer.families", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/transfer"), help="folder of results")
    print(families_table(read_results(parser.parse_args(arguments).results)), end="")


if __name__ == "__main__":
    main()
