"""How far each score is from the best one, on every question that the table asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.transfer.results import Result
from benchmarks.transfer.rows import DEFAULT, Needs

KINDS = ("match", "unknown", "corruption")
"""Is the nearest neighbour right (R-AUROC)? Is the input unknown (AUROC)? Is it corrupted (AUROC, worst level)?"""

_LEAST = 0.6
"""Where no gallery-free score reaches this AUROC, nothing is to be seen, and no gap is counted."""


@dataclass(frozen=True)
class Question:
    """One column of figures.

    Args:
        encoder: Its name.
        kind: One of :data:`KINDS`.
        item: Name of the unknown, or kind and level of the corruption; empty for matches.
        values: Row -> figure, larger is better.
        needs: Row -> what it keeps.
    """

    encoder: str
    kind: str
    item: str
    values: dict[str, float]
    needs: dict[str, str]

    @property
    def counts(self) -> bool:
        """Whether it can tell scores apart: always for matches, else if a gallery-free score sees something."""
        found = best(self, gallery_free)
        return found is not None and (self.kind == "match" or found[1] > _LEAST)


def gallery_free(needs: str) -> bool:
    """Whether a row does without training inputs and without the gallery."""
    return needs not in (Needs.GALLERY, Needs.LABELS)


def label_free(needs: str) -> bool:
    """Whether a row does without the labels of the gallery."""
    return needs != Needs.LABELS


def class_free(needs: str) -> bool:
    """Whether a row keeps nothing that grows with training data or classes."""
    return needs == Needs.NOTHING


def questions(result: Result) -> list[Question]:
    """All questions of one encoder."""
    rows = result["rows"]
    needs = {name: row["needs"] for name, row in rows.items()}
    columns: dict[tuple[str, str], dict[str, float | None]] = {
        ("match", ""): {name: row["r_auroc"] for name, row in rows.items()}
    }
    for name, row in rows.items():
        for unknown, figures in row["unknown"].items():
            columns.setdefault(("unknown", unknown), {})[name] = figures["auroc"]
        for kind, figures in row.get("corruption", {}).items():
            level = max(figures["auroc"], key=int)
            columns.setdefault(("corruption", f"{kind} {level}"), {})[name] = figures["auroc"][level]
    return [
        Question(result["name"], kind, item, {n: v for n, v in values.items() if v is not None}, needs)
        for (kind, item), values in columns.items()
        if any(value is not None for value in values.values())
    ]


def best(question: Question, allowed: Callable[[str], bool] = lambda _: True) -> tuple[str, float] | None:
    """The best row among those that keep what is allowed, and its figure."""
    found = {name: value for name, value in question.values.items() if allowed(question.needs[name])}
    return max(found.items(), key=lambda item: item[1]) if found else None


def resolve(row: str, result: Result) -> str:
    """The name of a row of the default posterior with the name of its structure."""
    return row.replace(f"{DEFAULT}/", f"{result['default']}/")


@dataclass(frozen=True)
class Gaps:
    """One row over all questions of one kind.

    Args:
        asked: Questions that the row has a figure for, and that count.
        mean: Of the figures.
        gap: Mean difference of the best gallery-free figure and the row's; below zero where the row is better.
        worst: The largest difference.
        where: Encoder and item of the largest.
    """

    asked: int
    mean: float
    gap: float
    worst: float
    where: str


def summarise(asked: Sequence[Question], row: str, kind: str) -> Gaps | None:
    """The gaps of a row; ``None`` where it answers no question of this kind."""
    found = [
        (top[1] - question.values[row], question)
        for question in asked
        if question.kind == kind and question.counts and row in question.values
        if (top := best(question, gallery_free)) is not None
    ]
    if not found:
        return None
    worst, question = max(found, key=lambda pair: pair[0])
    mean = math.fsum(q.values[row] for _, q in found) / len(found)
    gap = math.fsum(difference for difference, _ in found) / len(found)
    return Gaps(len(found), mean, gap, worst, f"{question.encoder} {question.item}".strip())
