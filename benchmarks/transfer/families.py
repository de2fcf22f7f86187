"""Means over the encoders of one data set and trunk, from the committed results: the first tables of docs/results.md.

``python -m benchmarks.transfer.families`` prints them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
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

RIVALS_RIGHT = {"norm": "minus norm", "vmf": "class density", "mahalanobis": "Mahalanobis, features"}
"""Scores of others that need no gallery."""

RIVALS_KNOWN = {"knn_embedding": "10-NN, embedding", "knn_features": "10-NN, features", "match": "distance to match"}
"""Scores of others that need the inputs of a gallery or of training."""

RIVALS_LABELLED = {**RIVALS_KNOWN, "knn_votes": "votes of 10-NN"}
"""Scores of others that need a gallery, some with its labels."""


def families_table(results: Sequence[Result]) -> str:
    """Return two tables with a line for each family: R-AUROC of right neighbours, and AUROC of unknown inputs.

    Args:
        results: As :func:`.read_results` gives them.

    Returns:
        Markdown; every figure is a mean over the family's encoders. The best of the others is picked for each line.
    """
    right, known = [], []
    for start, title in FAMILIES.items():
        mine = [result for result in results if result["name"].startswith(start)]
        if mine:
            first = f"{title} ({len(mine)})"
            map_at_1 = statistics.mean(result["map_at_1"] for result in mine)
            cells = [f"{value:.3f}" for value in (map_at_1, r_auroc(mine, "default/uncertainty"))]
            labelled = f"{r_auroc(mine, 'gated_labels'):.3f}"
            right.append(
                [first, *cells, _best(mine, r_auroc, RIVALS_RIGHT), labelled, _best(mine, r_auroc, RIVALS_LABELLED)]
            )
            novelty = f"{auroc(mine, 'default/novelty'):.3f}"
            known.append([first, novelty, _best(mine, auroc, RIVALS_RIGHT), _best(mine, auroc, RIVALS_KNOWN)])
    with_labels = ["`RetrievalUncertainty` with labels", "best other with a gallery"]
    return "\n\n".join(
        [
            table(["right neighbour?", "mAP@1", "`uncertainty`", "best other without a gallery", *with_labels], right),
            table(["known input?", "`novelty`", "best other that stores no inputs", "best other that does"], known),
        ]
    )


def r_auroc(results: Sequence[Result], score: str) -> float:
    """Return the mean R-AUROC of a score over encoders."""
    return statistics.mean(_row(result, score)["r_auroc"] for result in results)


def auroc(results: Sequence[Result], score: str) -> float:
    """Return the mean over encoders of a score's mean AUROC over the kinds of unknown input."""
    return statistics.mean(
        statistics.mean(kind["auroc"] for kind in _row(result, score)["unknown"].values()) for result in results
    )


def _best(results: Sequence[Result], mean: Callable[[Sequence[Result], str], float], scores: dict[str, str]) -> str:
    values = {title: mean(results, score) for score, title in scores.items()}
    title = max(values, key=lambda name: values[name])
    return f"{values[title]:.3f} {title}"


def _row(result: Result, name: str) -> Result:
    return result["rows"][name.replace("default/", f"{result['default']}/")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer.families", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/transfer"), help="folder of results")
    print(families_table(read_results(parser.parse_args(arguments).results)))


if __name__ == "__main__":
    main()
