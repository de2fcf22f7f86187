"""Each metric in plain words; ``docs/metrics.md`` has the formulas."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Explained", "explain", "percent"]


class Explained(NamedTuple):
    """One row of the table of metrics.

    Attributes:
        name: As in papers.
        value: As text.
        meaning: What it says, in one or two sentences.
        compare: Its best value and that of chance.
    """

    name: str
    value: str
    meaning: str
    compare: str


_MEANING = {
    "recall": ("Share of queries with something of their class among the {k} nearest.", "best 1"),
    "map": ("How many of the {k} nearest are of the query's class, where earlier ranks count more.", "best 1"),
    "r_auroc": (
        "Does the uncertainty find the wrong matches? The chance that a query with a wrong nearest neighbour is more "
        "uncertain than one with a right one.",
        "best 1, chance 0.5",
    ),
    "ausc": (
        "Mean share of right matches while the most uncertain queries are taken away one by one. It also grows with "
        "recall@1, so compare it at equal recall only.",
        "larger is better",
    ),
    "auroc": (
        "Does the novelty tell unknown inputs from known ones? The chance that an unknown input has a larger novelty "
        "than a known one.",
        "best 1, chance 0.5",
    ),
    "auprc": (
        "The same question, with more weight on the inputs of the largest novelty. Compare it only at the same numbers of "
        "known and unknown inputs.",
        "best 1, chance: the share of unknown inputs",
    ),
    "ece": (
        "Distance between confidence and share of right predictions, where sampled networks vote for a class.",
        "best 0",
    ),
    "brier": (
        "Squared error of the votes, read as class probabilities. Unlike the ECE, it cannot be small for wrong "
        "predictions.",
        "best 0, worst 2",
    ),
    "flagged_known": ("Share of known inputs that the threshold {k} flags by mistake.", "about {k}"),
    "flagged_unknown": ("Share of unknown inputs that the threshold {k} finds.", "best 1"),
}

_NAMES = {
    "recall": "Recall@{k}",
    "map": "mAP@{k}",
    "r_auroc": "R-AUROC",
    "ausc": "AUSC",
    "auroc": "AUROC, unknown",
    "auprc": "AUPRC, unknown",
    "ece": "ECE",
    "brier": "Brier score",
    "flagged_known": "Known flagged, alpha = {k}",
    "flagged_unknown": "Unknown found, alpha = {k}",
}


def explain(metrics: dict[str, float]) -> list[Explained]:
    """Rows of the table, in the order of the questions: retrieval, its errors, unknown inputs, calibration, thresholds."""
    rows = []
    for kind, name in _NAMES.items():
        for key, value in metrics.items():
            stem, _, k = key.partition("@")
            if stem == kind:
                meaning, compare = (text.format(k=k) for text in _MEANING[kind])
                shown = percent(value) if stem.startswith("flagged") else f"{value:.3f}"
                rows.append(Explained(name.format(k=k), shown, meaning, compare))
    return rows


def percent(share: float) -> str:
    """A share as text: one digit after the point, more where it is small."""
    hundred = 100 * share
    digits = 1 if hundred >= 1 or hundred == 0 else 2
    return f"{hundred:.{digits}f} %"
