"""The choice of the rules as Markdown, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.transfer.leave_out import Choice, Figures, Gaps, family, mean_over_families
from benchmarks.transfer.markdown import head, line
from benchmarks.transfer.part_table import BY, class_table, lower_table, part_to_json, strength_table
from benchmarks.transfer.study import Study, Tried

__all__ = ["choice_table", "to_json"]

_SHOWN = 20
"""Rules of the best ones that are shown."""


def choice_table(found: Study, machine: Mapping[str, Any]) -> str:
    """Both questions as Markdown."""
    encoders = [choice.encoder for choice in found.known.choices["gap"]]
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
            "norm, f the norm of the features, r the distance of the embedding to the nearest class centre of training "
            "over that to the second.",
            "",
            "## Is the nearest neighbour right? (`uncertainty`)",
            "",
            *_question(found.match, "R-AUROC"),
            "## Is the input of the known kind? (`novelty`)",
            "",
            "AUROC for unknown inputs, and for harmed inputs at the worst level, where the best gallery-free score is "
            "above 0.6. Quantities are logarithms, standardised on training inputs; one with a minus and a weight "
            "counts on its lower side.",
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
            by: {
                choice.encoder: {
                    "chosen": choice.rule,
                    "best": choice.best_rule,
                    "figures": {name: round(value, 4) for name, value in choice.figures.items()},
                }
                for choice in choices
            }
            for by, choices in tried.choices.items()
        },
        "strength": part_to_json(tried.strength),
        **({} if tried.classes is None else {"classes": part_to_json(tried.classes)}),
        **({} if tried.lower is None else {"lower": part_to_json(tried.lower)}),
    }


def _summary(found: Mapping[str, Figures]) -> dict[str, Any]:
    worst = max(found, key=lambda encoder: found[encoder]["largest"])
    return {
        "encoders": len(found),
        "figure": round(float(np.mean([one["figure"] for one in found.values()])), 4),
        "gap": round(mean_over_families(found), 4),
        "largest": round(found[worst]["largest"], 4),
        "at": worst,
    }


def _shown(tried: Tried) -> Gaps:
    """The best rules, those that are chosen, the library's at every strength, and simple ones at its own."""
    order = sorted(tried.gaps, key=lambda rule: mean_over_families(tried.gaps[rule]))
    chosen = {choice.rule for choices in tried.choices.values() for choice in choices}
    strength = tried.library.removeprefix(_form(tried.library))
    simple = [rule for rule in order if " of " not in rule and ", r " not in rule]
    simple = [rule for rule in simple if rule in (_form(rule), _form(rule) + strength)]
    rest = [rule for rule in order[_SHOWN:] if rule in chosen or rule in simple or _form(rule) == _form(tried.library)]
    return {rule: tried.gaps[rule] for rule in [*order[:_SHOWN], *rest]}


def _question(tried: Tried, figure: str) -> Iterator[str]:
    some = next(iter(tried.choices.values()))
    means = {name: _over_families(some, name) for name in ("library", "best", "reference")}
    yield (
        f"The library follows `{tried.library}`. Mean AUROC over the families, each left out in turn: the library's "
        f"rule {means['library']:.3f}, the best of {len(tried.gaps):,} rules in hindsight {means['best']:.3f}, the "
        f"best gallery-free score of the table {means['reference']:.3f}; and the rule that the others choose:"
    )
    yield ""
    yield from head(["chosen by", "AUROC where it had no say", "folds that choose the library's rule", "and its form"])
    for by, choices in tried.choices.items():
        rules = {family(choice.encoder): choice.rule for choice in choices}
        same = sum(rule == tried.library for rule in rules.values())
        form = sum(_form(rule) == _form(tried.library) for rule in rules.values())
        count = f"of {len(rules)}"
        yield line([BY[by], f"{_over_families(choices, 'chosen'):.3f}", f"{same} {count}", f"{form} {count}"])
    yield ""
    if tried.classes is not None:
        yield from class_table(tried.classes)
    if tried.lower is not None:
        yield from lower_table(tried.lower)
    yield from strength_table(tried.strength)
    yield "### Rules over all encoders"
    yield ""
    yield (
        f"The best {min(_SHOWN, len(tried.gaps))} of {len(tried.gaps):,} rules; below them those that are chosen, the "
        "library's form at every strength, and at its own strength single quantities and forms without a class part."
    )
    yield ""
    order = sorted(tried.gaps, key=lambda rule: mean_over_families(tried.gaps[rule]))
    yield from head(["place", "rule", f"mean {figure}", "mean gap", "largest gap", "at", "chosen for so many encoders"])
    for rule, gaps in _shown(tried).items():
        one = _summary(gaps)
        name = f"**{rule}** (library)" if rule == tried.library else rule
        count = ", ".join(
            f"{n} ({BY[by]})"
            for by, choices in tried.choices.items()
            if (n := sum(choice.rule == rule for choice in choices))
        )
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
    columns = [f"chosen without it by {BY[by]} | AUROC" for by in tried.choices]
    shown = " | ".join(["encoder", *columns, "library", "best rule there", "AUROC", "best gallery-free"])
    yield from head(shown.split(" | "))
    for of_encoder in zip(*tried.choices.values(), strict=True):
        one = of_encoder[0]
        cells = [cell for choice in of_encoder for cell in (choice.rule, f"{choice.figures['chosen']:.3f}")]
        figures = {name: f"{value:.3f}" for name, value in one.figures.items()}
        yield line([one.encoder, *cells, figures["library"], one.best_rule, figures["best"], figures["reference"]])
    yield ""


def _cells(one: Mapping[str, Any]) -> list[str]:
    return [f"{one['figure']:.3f}", f"{one['gap']:.3f}", f"{one['largest']:.3f}", one["at"]]


def _form(rule: str) -> str:
    """A rule's name without the strength of the prior."""
    return rule.rsplit(", strength ", 1)[0]


def _over_families(choices: list[Choice], name: str) -> float:
    groups: dict[str, list[float]] = {}
    for choice in choices:
        groups.setdefault(family(choice.encoder), []).append(choice.figures[name])
    return float(np.mean([np.mean(group) for group in groups.values()]))
