"""Each metric in plain words; ``docs/metrics.md`` has the formulas."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Explained", "explain", "percent"]


class Explained(NamedTuple):
    """One row of the table of metrics.

    Attributes:
        name: As in papers.
        values: ``("", value)``, or one pair for each k or alpha, as text.
        meaning: What it says, in one or two sentences.
        compare: Its best value and that of chance.
    """

    name: str
    values: list[tuple[str, str]]
    meaning: str
    compare: str


_ROWS = {
    "recall": ("Recall@k", "Share of queries with something of their class among the k nearest.", "best 1"),
    "map": (
        "mAP@k",
        "How many of the k nearest are of the query's class, where earlier ranks count more.",
        "best 1",
    ),
    "r_auroc": (
        "R-AUROC",
        "Does the uncertainty find the wrong matches? The chance that a query with a wrong nearest neighbour is more "
        "uncertain than one with a right one.",
        "best 1, chance 0.5",
    ),
    "ausc": (
        "AUSC",
        "Mean share of right matches while the most uncertain queries are taken away one by one. It also grows with "
        "recall@1, so compare it at equal recall only.",
        "larger is better",
    ),
    "auroc": (
        "AUROC, unknown",
        "Does the novelty tell unknown inputs from known ones? The chance that an unknown input has a larger novelty "
        "than a known one.",
        "best 1, chance 0.5",
    ),
    "auprc": (
        "AUPRC, unknown",
        "The same question, with more weight on the inputs of the largest novelty. Compare it only at the same numbers "
        "of known and unknown inputs.",
        "best 1, chance: the share of unknown inputs",
    ),
    "ece": (
        "ECE",
        "Distance between confidence and share of right predictions, where sampled networks vote for a class.",
        "best 0",
    ),
    "brier": (
        "Brier score",
        "Squared error of the votes, read as class probabilities. Unlike the ECE, it cannot be small for wrong "
        "predictions.",
        "best 0, worst 2",
    ),
    "flagged_known": (
        "Known flagged",
        "Share of known inputs that the threshold alpha flags by mistake.",
        "about alpha",
    ),
    "flagged_unknown": (
        "Unknown found",
        "Share of unknown inputs that the threshold alpha finds.",
        "best 100 %",
    ),
}


def explain(metrics: dict[str, float]) -> list[Explained]:
    """Rows of the table, in the order of the questions; a metric at several k or alpha has one row."""
    rows = []
    for kind, texts in _ROWS.items():
        found = {key.partition("@")[2]: value for key, value in metrics.items() if key.partition("@")[0] == kind}
        if found:
            of = "alpha" if kind.startswith("flagged") else "k"
            shown = {k: percent(value) if of == "alpha" else f"{value:.3f}" for k, value in found.items()}
            name, meaning, compare = texts
            rows.append(Explained(name, [(f"{of} = {k}" if k else "", v) for k, v in shown.items()], meaning, compare))
    return rows


def percent(share: float) -> str:
    """A share as text: one digit after the point, more where it is small."""
    hundred = 100 * share
    digits = 1 if hundred >= 1 or hundred == 0 else 2
    return f"{hundred:.{digits}f} %"
