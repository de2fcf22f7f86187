"""The choice of the rules as Markdown, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.transfer.leave_out import Choice, Figures, Gaps, Study, Tried, family, mean_gap
from benchmarks.transfer.markdown import head, line

__all__ = ["choice_table", "to_json"]

_SHOWN = 20
"""Rules of the best ones that are shown."""


def choice_table(found: Study, machine: Mapping[str, Any]) -> str:
    """Both questions as Markdown."""
    encoders = [choice.encoder for choice in found.known.choices]
    families = sorted({family(name) for name in encoders})
    text = "\n".join(
        [
            "# What the rules of the two answers were chosen on",
            "",
            f"Written by `python -m benchmarks.transfer.choose` from {len(encoders)} encoders of {len(families)} "
            f"families ({', '.join(families)}); {machine['cpu']}, {machine['threads']} threads, torch "
            f"{machine['torch']}. Encoders of one data set and one trunk are a family, and are left out together. A "
            "gap is the AUROC of the best gallery-free score of `transfer.md` minus that of the rule, so that a rule "
            "is compared with a different, and the best, score on every question; it is averaged over an encoder's "
            "questions, its family's encoders, and the families. V is the tangential variance of the raw output, n its "
            "norm, f the norm of the features.",
            "",
            "## Is the nearest neighbour right? (`uncertainty`)",
            "",
            *_question(found.match, "R-AUROC"),
            "## Is the input of the known kind? (`novelty`)",
            "",
            "AUROC for unknown inputs, and for harmed inputs at the worst level, where the best gallery-free score is "
            "above 0.6. Quantities are logarithms, standardised on training inputs.",
            "",
            *_question(found.known, "AUROC"),
        ]
    )
    # A bar would end the cell of a table.
    return text.replace("|phi|", "f")


def to_json(found: Study, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Both questions with their choices and the rules that are shown, figures of four digits."""
    return {
        "machine": dict(machine),
        **{name: _to_json(tried) for name, tried in (("match", found.match), ("known", found.known))},
    }


def _to_json(tried: Tried) -> dict[str, Any]:
    return {
        "library": tried.library,
        "rules": {name: _summary(found) for name, found in _shown(tried).items()},
        "others": {name: _summary(found) for name, found in tried.others.items()},
        "choices": {
            choice.encoder: {
                "chosen": choice.rule,
                "best": choice.best_rule,
                "figures": {name: round(value, 4) for name, value in choice.figures.items()},
            }
            for choice in tried.choices
        },
    }


def _summary(found: Mapping[str, Figures]) -> dict[str, Any]:
    worst = max(found, key=lambda encoder: found[encoder]["largest"])
    return {
        "encoders": len(found),
        "figure": round(float(np.mean([one["figure"] for one in found.values()])), 4),
        "gap": round(mean_gap(found), 4),
        "largest": round(found[worst]["largest"], 4),
        "at": worst,
    }


def _shown(tried: Tried) -> Gaps:
    """The best rules, those of one quantity, and the library's at every strength."""
    order = sorted(tried.gaps, key=lambda rule: mean_gap(tried.gaps[rule]))
    alike = tried.library.rsplit(", ", 1)[0]
    rest = [rule for rule in order[_SHOWN:] if rule.rsplit(", ", 1)[0] == alike or " of " not in rule]
    return {rule: tried.gaps[rule] for rule in [*order[:_SHOWN], *rest]}


def _question(tried: Tried, figure: str) -> Iterator[str]:
    chosen = [choice.rule for choice in tried.choices]
    families = {family(choice.encoder): choice.rule for choice in tried.choices}
    agreed = sum(rule == tried.library for rule in families.values())
    means = {name: _over_families(tried.choices, name) for name in ("chosen", "library", "best", "reference")}
    yield (
        f"The library follows `{tried.library}`. With one family left out, the others choose it in {agreed} of "
        f"{len(families)} cases. Mean over the families that were left out: the rule chosen without them "
        f"{means['chosen']:.3f}, the library's {means['library']:.3f}, the best of {len(tried.gaps)} rules in "
        f"hindsight {means['best']:.3f}, the best gallery-free score of the table {means['reference']:.3f}."
    )
    yield ""
    yield "### Rules over all encoders"
    yield ""
    order = sorted(tried.gaps, key=lambda rule: mean_gap(tried.gaps[rule]))
    yield from head(["place", "rule", f"mean {figure}", "mean gap", "largest gap", "at", "chosen for"])
    for rule, gaps in _shown(tried).items():
        one = _summary(gaps)
        name = f"**{rule}** (library)" if rule == tried.library else rule
        count = f"{chosen.count(rule)} encoders" if rule in chosen else ""
        yield line([str(1 + order.index(rule)), name, *_cells(one), count])
    yield ""
    yield "Beside them, not to be chosen; the library's rule at its own rank, over the same encoders, in brackets:"
    yield ""
    yield from head(["rule", "encoders", f"mean {figure}", "mean gap", "largest gap", "at"])
    for rule, gaps in tried.others.items():
        own = _summary({name: tried.gaps[tried.library][name] for name in gaps})
        one = _summary(gaps)
        shown = [f"{one[key]:.3f} ({own[key]:.3f})" for key in ("figure", "gap", "largest")]
        yield line([rule, str(len(gaps)), *shown, one["at"]])
    yield ""
    yield "### Every encoder, and the rule that was chosen without its family"
    yield ""
    columns = [
        "encoder",
        "chosen without it",
        "chosen",
        "library",
        "best rule there",
        "best",
        "best gallery-free score",
    ]
    yield from head(columns)
    for choice in tried.choices:
        figures = {name: f"{value:.3f}" for name, value in choice.figures.items()}
        cells = [choice.encoder, choice.rule, figures["chosen"], figures["library"]]
        yield line([*cells, choice.best_rule, figures["best"], figures["reference"]])
    yield ""


def _cells(one: Mapping[str, Any]) -> list[str]:
    return [f"{one['figure']:.3f}", f"{one['gap']:.3f}", f"{one['largest']:.3f}", one["at"]]


def _over_families(choices: list[Choice], name: str) -> float:
    groups: dict[str, list[float]] = {}
    for choice in choices:
        groups.setdefault(family(choice.encoder), []).append(choice.figures[name])
    return float(np.mean([np.mean(group) for group in groups.values()]))
