"""Leave-one-encoder-out: the rule that all other encoders choose, and how it does on the one that had no say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypedDict

import numpy as np

__all__ = [
    "CRITERIA",
    "Choice",
    "Criterion",
    "Figures",
    "Gaps",
    "Part",
    "choose",
    "choose_part",
    "family",
    "mean_over_families",
]


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


@cache
def family(encoder: str) -> str:
    """Data set and trunk: encoders that share both are not independent of each other."""
    return re.sub(r"-\d+-(contrastive|supcon|triplet)(-seed\d+)?$", "", encoder)


def mean_over_families(found: Mapping[str, Figures], of: Literal["figure", "gap", "largest"] = "gap") -> float:
    """Mean over families of the mean over their encoders.

    Args:
        found: Encoder -> figures.
        of: Which of them.
    """
    return float(np.mean(list(_by_family(found, of).values())))


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
class Part:
    """One part of the library's rule, chosen by leaving families out while the rest of the rule stays as it is.

    Args:
        library: What the library has.
        candidates: What the part could be -> encoder -> figures.
        choices: Criterion -> family that is left out -> what all others choose.
    """

    library: str
    candidates: Gaps
    choices: dict[Criterion, dict[str, str]]

    def there(self, candidate: str, left_out: str) -> Figures:
        """Means of a candidate's figures over the encoders of one family."""
        found = {name: figures for name, figures in self.candidates[candidate].items() if family(name) == left_out}
        return self._means(found)

    def mean(self, candidate: str) -> Figures:
        """Means of a candidate's figures over all families."""
        return self._means(self.candidates[candidate])

    def without_a_say(self, by: Criterion) -> Figures:
        """Means over all families of the figures of what the others choose."""
        chosen = self.choices[by]
        return self._means(
            {name: self.candidates[chosen[family(name)]][name] for name in self.candidates[self.library]}
        )

    @staticmethod
    def _means(found: Mapping[str, Figures]) -> Figures:
        return Figures(
            figure=mean_over_families(found, "figure"),
            gap=mean_over_families(found, "gap"),
            largest=mean_over_families(found, "largest"),
        )


def choose(gaps: Gaps, library: str, by: Criterion) -> list[Choice]:
    """Leave each family out in turn, and take the rule whose criterion is smallest on the others.

    Args:
        gaps: Of all rules that can be chosen, over the same encoders.
        library: Name of the rule that the library follows.
        by: The criterion.
    """
    chosen = _folds(gaps, by)
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


def choose_part(candidates: Gaps, library: str, criteria: Iterable[Criterion]) -> Part:
    """Leave each family out in turn, and take the candidate whose criterion is smallest on the others.

    Args:
        candidates: What the part could be -> encoder -> figures, over the same encoders.
        library: Which of them the library has.
        criteria: Each by itself.
    """
    return Part(library, candidates, {by: _folds(candidates, by) for by in criteria})


def _folds(gaps: Gaps, by: Criterion) -> dict[str, str]:
    """Family that is left out -> what is best on all others."""
    means = {name: _by_family(found, by) for name, found in gaps.items()}
    families = sorted({one for found in means.values() for one in found})

    def elsewhere(name: str, left_out: str) -> float:
        return float(np.mean([value for one, value in means[name].items() if one != left_out]))

    return {left_out: min(gaps, key=lambda name: elsewhere(name, left_out)) for left_out in families}


def _by_family(found: Mapping[str, Figures], of: Literal["figure", "gap", "largest"]) -> dict[str, float]:
    groups: dict[str, list[float]] = {}
    for encoder, figures in found.items():
        groups.setdefault(family(encoder), []).append(figures[of])
    return {name: float(np.mean(group)) for name, group in groups.items()}
