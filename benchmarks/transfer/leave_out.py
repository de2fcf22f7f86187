"""Leave-one-encoder-out: the rule that all other encoders choose, and how it does on the one that had no say."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from benchmarks.transfer.gaps import Question, best, gallery_free
from benchmarks.transfer.rules import (
    LIBRARY_KNOWN,
    LIBRARY_MATCH,
    Encoder,
    Rule,
    density_rules,
    known_rules,
    match_rules,
    rank_rules,
)
from contrastive_curvature.errors import InputError, expected

__all__ = [
    "CRITERIA",
    "Choice",
    "Criterion",
    "Figures",
    "Gaps",
    "Study",
    "Tried",
    "auroc",
    "choose",
    "family",
    "mean_gap",
    "references",
    "study",
]

Numbers = NDArray[np.float64]

References = dict[str, dict[str, float]]
"""Encoder -> ``match`` or set of inputs -> the best gallery-free figure, for questions that count."""


class Figures(TypedDict):
    """How a rule does on an encoder, over the questions that count."""

    figure: float
    """Mean AUROC."""
    gap: float
    """Mean gap to the best gallery-free score of the judge's table."""
    largest: float
    """Largest of these gaps."""


Criterion = Literal["gap", "largest"]

CRITERIA: tuple[Criterion, ...] = ("largest", "gap")
"""What is to be small on the other encoders: their largest gap, as targets are about every question, or the mean."""

Gaps = dict[str, dict[str, Figures]]
"""Rule -> encoder -> figures."""

_Ask = Callable[[Rule, Encoder, Mapping[str, float]], list[tuple[float, float]]]
"""Figure and gap of every question that counts."""


def references(asked: Sequence[Question]) -> References:
    """The best gallery-free figures among the judge's rows."""
    out: References = {}
    for question in asked:
        found = best(question, gallery_free)
        if not question.counts or found is None:
            continue
        one = {
            "match": "match",
            "unknown": f"unknown_{question.item}",
            "harm": f"harmed_{question.item.rsplit(' ', 1)[0]}",
        }[question.kind]
        out.setdefault(question.encoder, {})[one] = found[1]
    return out


def family(encoder: str) -> str:
    """Data set and trunk: encoders that share both are not independent of each other."""
    return re.sub(r"-\d+-(contrastive|supcon|triplet)(-seed\d+)?$", "", encoder)


def auroc(known: Numbers, unknown: Numbers) -> float:
    """AUROC of scores for the unknown; ``known`` is sorted."""
    below = np.searchsorted(known, unknown, "left") + np.searchsorted(known, unknown, "right")
    return float(below.mean() / (2 * len(known)))


@dataclass(frozen=True)
class Choice:
    """What is chosen without one encoder's family, and how that does on the encoder.

    Args:
        encoder: The one that had no say.
        rule: Chosen on all other families.
        best_rule: The best one on this encoder, in hindsight.
        figures: Mean AUROC over the questions that count: of the rule ``chosen``, of the ``library``'s, of the ``best``
            one, and ``reference``: of the best gallery-free scores of the judge's table.
    """

    encoder: str
    rule: str
    best_rule: str
    figures: dict[str, float]


@dataclass(frozen=True)
class Tried:
    """All rules for one of the two questions.

    Args:
        library: Name of the rule that the library follows.
        gaps: Of the rules that can be chosen.
        others: Of rules that are shown beside them.
        choices: Criterion, one of :data:`CRITERIA` -> one for each encoder.
    """

    library: str
    gaps: Gaps
    others: Gaps
    choices: dict[Criterion, list[Choice]]


@dataclass(frozen=True)
class Study:
    """Both questions."""

    match: Tried
    known: Tried


def study(encoders: Sequence[Encoder], reference: References) -> Study:
    """Try all rules on all encoders.

    Args:
        encoders: Of at least two families.
        reference: The figures that gaps are taken to.

    Raises:
        InputError: There are fewer than two families.
    """
    families = {family(encoder.name) for encoder in encoders}
    if len(families) < 2:
        came = f"{len(encoders)} encoders of {len(families)}"
        raise InputError(expected("encoders", "feature files and results of at least two families", came))
    ranks = list(rank_rules())
    match = _gaps(list(match_rules()), encoders, reference, _match_figures)
    match_ranks = _gaps([rule for rule, _ in ranks], encoders, reference, _match_figures)
    known = _gaps(list(known_rules()), encoders, reference, _known_figures)
    others = [*density_rules(), *(rule for _, rule in ranks)]
    known_others = _gaps(others, encoders, reference, _known_figures)
    return Study(
        # There is one question about matches, so that both criteria are the same.
        Tried(LIBRARY_MATCH, match, match_ranks, {"gap": choose(match, LIBRARY_MATCH, "gap")}),
        Tried(LIBRARY_KNOWN, known, known_others, {by: choose(known, LIBRARY_KNOWN, by) for by in CRITERIA}),
    )


def mean_gap(gaps: Mapping[str, Figures], without: str = "", by: Criterion = "gap") -> float:
    """Mean over families of the mean criterion of their encoders, one family left out."""
    groups: dict[str, list[float]] = {}
    for encoder, found in gaps.items():
        groups.setdefault(family(encoder), []).append(found[by])
    means = [float(np.mean(group)) for name, group in groups.items() if name != without]
    return float(np.mean(means)) if means else float("inf")


def choose(gaps: Gaps, library: str, by: Criterion) -> list[Choice]:
    """Leave each family out in turn, and take the rule whose criterion is smallest on the others.

    Args:
        gaps: Of all rules that can be chosen, over the same encoders.
        library: Name of the rule that the library follows.
        by: The criterion.
    """
    chosen = {}
    for left_out in {family(encoder) for encoder in gaps[library]}:
        means = {rule: mean_gap(found, left_out, by) for rule, found in gaps.items()}
        chosen[left_out] = min(means, key=lambda rule, means=means: means[rule])  # type: ignore[misc]
    out = []
    for encoder, own in gaps[library].items():
        there = {rule: found[encoder]["figure"] for rule, found in gaps.items()}
        rule, top = chosen[family(encoder)], max(there.items(), key=lambda pair: pair[1])
        figures = {
            "chosen": there[rule],
            "library": own["figure"],
            "best": top[1],
            "reference": own["figure"] + own["gap"],
        }
        out.append(Choice(encoder, rule, top[0], figures))
    return out


def _gaps(rules: Sequence[Rule], encoders: Sequence[Encoder], reference: References, ask: _Ask) -> Gaps:
    out: Gaps = {}
    for encoder in encoders:
        for rule in rules:
            figures = ask(rule, encoder, reference.get(encoder.name, {})) if encoder.has(rule.variance) else []
            if figures:
                gaps = [gap for _, gap in figures]
                mean = float(np.mean([figure for figure, _ in figures]))
                found = Figures(figure=mean, gap=float(np.mean(gaps)), largest=max(gaps))
                out.setdefault(rule.name, {})[encoder.name] = found
    return out


def _match_figures(rule: Rule, encoder: Encoder, reference: Mapping[str, float]) -> list[tuple[float, float]]:
    """R-AUROC of a rule, and its gap; nothing where all matches are right, or all wrong."""
    if "match" not in reference:
        return []
    score, right = rule.score(encoder)("test"), encoder.values["test"]["right"]
    figure = auroc(np.sort(score[right == 1]), score[right == 0])
    return [(figure, reference["match"] - figure)]


def _known_figures(rule: Rule, encoder: Encoder, reference: Mapping[str, float]) -> list[tuple[float, float]]:
    """AUROC and gap of a rule for every set that is told from the test inputs."""
    score = rule.score(encoder)
    known = np.sort(score("test"))
    figures = {one: auroc(known, score(one)) for one in encoder.unknowns if one in reference}
    return [(figure, reference[one] - figure) for one, figure in figures.items()]
