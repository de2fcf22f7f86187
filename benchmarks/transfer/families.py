"""Means over the encoders of one data set and trunk, from the committed results: the first tables of docs/results.md.

``python -m benchmarks.transfer.families`` prints them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.machine import table
from benchmarks.transfer.results import Result, read_results
from benchmarks.transfer.rows import resolve

FAMILIES = {
    "cifar10-resnet56": "CIFAR-10, pretrained ResNet-56",
    "cifar10-resnet-": "CIFAR-10, small ResNet",
    "cifar10-paper": "CIFAR-10, the paper's network",
    "faces": "faces (LFW), pretrained MobileFaceNet",
    "clinc150-64": "sentences (CLINC150)",
    "clinc150-unseen": "sentences (CLINC150), unseen intents",
    "omniglot": "drawings (Omniglot), unseen alphabets",
    "fashionmnist": "Fashion-MNIST, the paper's network",
    "minilm": "sentences (CLINC150), MiniLM",
    "mnist": "MNIST, the paper's network",
}
"""Beginning of an encoder's name, and what stands in the table."""

RIVALS_RIGHT = {
    "norm": "minus norm",
    "vmf": "class density",
    "mahalanobis": "Mahalanobis, features",
    "mahalanobis_unit": "Mahalanobis, normalised features",
    "mahalanobis_relative": "relative Mahalanobis, features",
    "mahalanobis_one": "Mahalanobis, one centre, features",
    "residual": "ViM's residual, features",
}
"""Scores of others that need no gallery."""

RIVALS_KNOWN = {"knn_embedding": "10-NN, embedding", "knn_features": "10-NN, features", "match": "distance to match"}
"""Scores of others that need the inputs of a gallery or of training."""

RIVALS_LABELLED = {**RIVALS_KNOWN, "knn_votes": "votes of 10-NN"}
"""Scores of others that need a gallery, some with its labels."""

OURS = {
    "default/uncertainty": "`uncertainty`",
    "default/without_classes": "`uncertainty` without class centres",
    "default/novelty": "`novelty`",
    "gated_labels": "`RetrievalUncertainty` with labels",
}
"""The library's own. ``RetrievalUncertainty`` is no more; committed results have it."""

STORES = {
    "default/uncertainty": "posterior, C D",
    "default/without_classes": "posterior",
    "default/novelty": "posterior, C F",
    "norm": "nothing",
    "vmf": "C D",
    "mahalanobis": "F^2 + C F",
    "mahalanobis_unit": "F^2 + C F",
    "mahalanobis_relative": "2 C F",
    "mahalanobis_one": "F^2",
    "residual": "F K",
    "knn_embedding": "N D",
    "knn_features": "N F",
    "match": "M D",
    "knn_votes": "M D",
    "gated_labels": "posterior, M D",
}
"""How many numbers a score keeps: C classes, F features, K <= 1000 axes, D dimensions, N training inputs, M others."""

UNSEEN = ("faces", "clinc150-unseen", "omniglot")
"""Families whose test inputs are of classes that training has not seen."""


def families_table(results: Sequence[Result]) -> str:
    """Return two tables with a line for each family, two with a line for each score, and the weakest encoders.

    Each pair has the R-AUROC of right neighbours (by score: where classes are unseen) and the AUROC of unknown inputs.

    Args:
        results: As :func:`.read_results` gives them.

    Returns:
        Markdown; every figure is a mean over the family's encoders. The best of the others is picked for each line. A
        score that an encoder of the family does not allow is left out of it.
    """
    named = {start: [result for result in results if result["name"].startswith(start)] for start in FAMILIES}
    families = {start: mine for start, mine in named.items() if mine}
    right, known = [], []
    for start, mine in families.items():
        first = f"{FAMILIES[start]} ({len(mine)})"
        map_at_1 = statistics.mean(result["map_at_1"] for result in mine)
        cells = [f"{value:.3f}" for value in (map_at_1, r_auroc(mine, "default/uncertainty"))]
        labelled = f"{r_auroc(mine, 'gated_labels'):.3f}" if has(mine, "gated_labels") else ""
        right.append(
            [first, *cells, _best(mine, r_auroc, RIVALS_RIGHT), labelled, _best(mine, r_auroc, RIVALS_LABELLED)]
        )
        kinds = by_kind(mine, "default/novelty")
        worst = min(kinds, key=lambda kind: kinds[kind])
        novelty = [f"{auroc(mine, 'default/novelty'):.3f}", f"{kinds[worst]:.3f} {worst}"]
        known.append([first, *novelty, _best(mine, auroc, RIVALS_RIGHT), _best(mine, auroc, RIVALS_KNOWN)])
    right_head = ["right neighbour?", "mAP@1", "`uncertainty`", "best other without a gallery"]
    right_head += ["`RetrievalUncertainty` with labels", "best other with a gallery"]
    known_head = ["known input?", "`novelty`", "its worst kind"]
    known_head += ["best other that stores no inputs", "best other that does"]
    every = [result for mine in families.values() for result in mine]
    return "\n\n".join([table(right_head, right), table(known_head, known), *_by_score(families), _weakest(every)])


def _weakest(results: Sequence[Result]) -> str:
    """Return on which encoders the novelty is furthest behind the best other that stores no inputs."""
    shares = {}
    for result in results:
        best = max(auroc([result], score) for score in RIVALS_RIGHT if has([result], score))
        shares[result["name"]] = auroc([result], "default/novelty") / best
    least = sorted(shares, key=lambda name: shares[name])[:3]
    near = sum(share >= 0.9 for share in shares.values())
    return (
        f"Novelty over the best other that stores no inputs, encoder by encoder: 0.9 or more on {near} of {len(shares)}"
        f", least {', '.join(f'{shares[name]:.3f} {name}' for name in least)}."
    )


def _by_score(families: dict[str, list[Result]]) -> Iterator[str]:
    def cells(
        scores: dict[str, str], starts: Iterable[str], shown: Callable[[list[Result], str], str]
    ) -> list[list[str]]:
        of = [families[start] for start in starts]
        return [
            [title, STORES[score], *(shown(mine, score) if has(mine, score) else "" for mine in of)]
            for score, title in scores.items()
        ]

    scores = {"default/novelty": OURS["default/novelty"], **RIVALS_RIGHT, **RIVALS_KNOWN}
    head = [
        "known input? mean / worst kind",
        "numbers kept",
        *(start.removesuffix("-64").strip("-") for start in families),
    ]
    yield table(
        head,
        cells(scores, families, lambda mine, x: f"{auroc(mine, x):.3f} / {min(by_kind(mine, x).values()):.3f}"),
    )
    unseen = [start for start in UNSEEN if start in families]
    scores = {**OURS, **RIVALS_RIGHT, **RIVALS_LABELLED}
    head = ["right neighbour, unseen classes?", "numbers kept", *unseen]
    yield table(head, cells(scores, unseen, lambda mine, x: f"{r_auroc(mine, x):.3f}"))


def has(results: Sequence[Result], score: str) -> bool:
    """Return whether all of the encoders have figures of a score."""
    return all(resolve(score, result) in result["rows"] for result in results)


def r_auroc(results: Sequence[Result], score: str) -> float:
    """Return the mean R-AUROC of a score over encoders."""
    return statistics.mean(_row(result, score)["r_auroc"] for result in results)


def auroc(results: Sequence[Result], score: str) -> float:
    """Return the mean over encoders of a score's mean AUROC over the kinds of unknown input."""
    return statistics.mean(
        statistics.mean(kind["auroc"] for kind in _row(result, score)["unknown"].values()) for result in results
    )


def by_kind(results: Sequence[Result], score: str) -> dict[str, float]:
    """Return the mean AUROC over encoders of every kind of unknown input, which all of them have."""
    rows = [_row(result, score)["unknown"] for result in results]
    return {kind: statistics.mean(row[kind]["auroc"] for row in rows) for kind in rows[0]}


def _best(results: Sequence[Result], mean: Callable[[Sequence[Result], str], float], scores: dict[str, str]) -> str:
    values = {title: mean(results, score) for score, title in scores.items() if has(results, score)}
    title = max(values, key=lambda name: values[name])
    return f"{values[title]:.3f} {title}"


def _row(result: Result, name: str) -> Result:
    return result["rows"][resolve(name, result)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer.families", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/transfer"), help="folder of results")
    print(families_table(read_results(parser.parse_args(arguments).results)))


if __name__ == "__main__":
    main()
