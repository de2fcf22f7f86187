"""All rules on all encoders, and what leaving families out chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.transfer.compact import STRENGTHS, variance_name
from benchmarks.transfer.gaps import Question, best, gallery_free
from benchmarks.transfer.leave_out import CRITERIA, Choice, Criterion, Figures, Gaps, Part, choose, choose_part, family
from benchmarks.transfer.quantities import Encoder, Numbers
from benchmarks.transfer.rules import (
    LIBRARY_CLASSES,
    LIBRARY_KNOWN,
    LIBRARY_LOWER,
    LIBRARY_MATCH,
    Rule,
    class_rules,
    density_rules,
    known_rules,
    library_at,
    lower_rules,
    match_rules,
    rank_rules,
)
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.laplace.prior import STRENGTH

__all__ = ["Study", "Tried", "auroc", "references", "study"]

References = dict[str, dict[str, float]]
"""Encoder -> ``match`` or set of inputs -> the best gallery-free figure, for questions that count."""

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


def auroc(known: Numbers, unknown: Numbers) -> float:
    """AUROC of scores for the unknown; ``known`` is sorted."""
    below = np.searchsorted(known, unknown, "left") + np.searchsorted(known, unknown, "right")
    return float(below.mean() / (2 * len(known)))


@dataclass(frozen=True)
class Tried:
    """All rules for one of the two questions.

    Args:
        library: Name of the rule that the library follows.
        gaps: Of the rules that can be chosen.
        others: Of rules that are shown beside them.
        choices: Criterion, one of :data:`.CRITERIA` -> one for each encoder.
        strength: The choice of the strength of the prior alone.
        lower: The choice of the lower side alone; ``None`` where rules have none.
        classes: The choice of the class part alone; ``None`` where rules have none.
    """

    library: str
    gaps: Gaps
    others: Gaps
    choices: dict[Criterion, list[Choice]]
    strength: Part
    lower: Part | None = None
    classes: Part | None = None


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
    match = _gaps(match_rules(), encoders, reference, _match_figures)
    match_ranks = _gaps([rule for rule, _ in ranks], encoders, reference, _match_figures)
    known = _gaps(known_rules(), encoders, reference, _known_figures)
    others = [*density_rules(), *(rule for _, rule in ranks)]
    known_others = _gaps(others, encoders, reference, _known_figures)
    sides = {name: rule.name for name, rule in lower_rules().items()}
    further = [rule for rule in lower_rules().values() if rule.name not in known]
    by_side = known | _gaps(further, encoders, reference, _known_figures)
    at = {f"{strength:g}": library_at(variance_name(strength), f"strength {strength:g}") for strength in STRENGTHS}
    parts = class_rules()
    # There is one question about matches, so that both criteria are the same.
    return Study(
        Tried(
            LIBRARY_MATCH,
            match,
            match_ranks,
            {"gap": choose(match, LIBRARY_MATCH, "gap")},
            choose_part({name: match[rule.name] for name, (rule, _) in at.items()}, f"{STRENGTH:g}", ["gap"]),
            classes=choose_part({name: match[rule.name] for name, rule in parts.items()}, LIBRARY_CLASSES, ["gap"]),
        ),
        Tried(
            LIBRARY_KNOWN,
            known,
            known_others,
            {by: choose(known, LIBRARY_KNOWN, by) for by in CRITERIA},
            choose_part({name: known[rule.name] for name, (_, rule) in at.items()}, f"{STRENGTH:g}", CRITERIA),
            choose_part({name: by_side[rule] for name, rule in sides.items()}, LIBRARY_LOWER, CRITERIA),
        ),
    )


def _gaps(rules: Iterable[Rule], encoders: Sequence[Encoder], reference: References, ask: _Ask) -> Gaps:
    out: Gaps = {}
    tried = list(rules)
    for encoder in encoders:
        for rule in tried:
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
