"""The choice of one part of a rule as Markdown, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.transfer.leave_out import Criterion, Figures, Part
from benchmarks.transfer.markdown import head, line
from benchmarks.transfer.quantities import WITH_VARIANCE
from benchmarks.transfer.rules import (
    CAPS,
    CLASS_WEIGHTS,
    LOWER_WEIGHTS,
    NO_CLASSES,
    NO_LOWER,
    class_name,
    lower_name,
)

__all__ = ["BY", "class_table", "lower_table", "part_to_json", "strength_table"]

BY: dict[Criterion, str] = {"gap": "mean gap", "largest": "largest gap of an encoder"}


def lower_table(part: Part) -> Iterator[str]:
    """What the others choose as the lower side of ``novelty``, and how all candidates do."""
    yield "### The lower side alone"
    yield ""
    yield (
        "The soft max takes three quantities on their upper side: the larger, the less is the input like the known "
        "ones. An input may have less variance than all known ones, too, so one quantity counts on its lower side: "
        "minus its standardised logarithm, times a weight. Here the upper side and the strength stay as the library "
        f"has them, and the other families choose the lower side among {len(part.candidates)}: none, and "
        f"{len(WITH_VARIANCE)} quantities with {len(LOWER_WEIGHTS)} weights each. {_cells_are(part)}"
    )
    yield ""
    yield from _summary(part, "lower side", [part.library, NO_LOWER])
    yield from _families(part, {part.library: f"library: {part.library}", NO_LOWER: NO_LOWER})
    yield "All lower sides over all families; the library's is bold."
    yield ""
    yield from head(["lower side: minus", *(f"times {weight:g}" for weight in LOWER_WEIGHTS)])
    for quantity in WITH_VARIANCE:
        yield _grid_line(part, quantity, [lower_name(quantity, weight) for weight in LOWER_WEIGHTS])
    yield ""


def class_table(part: Part) -> Iterator[str]:
    """What the others choose as the class part of ``uncertainty``, and how all candidates do."""
    yield "### The class part alone"
    yield ""
    yield (
        "An embedding between two classes has more often a wrong neighbour than one near a class centre. r is the "
        "distance of the embedding to the nearest class centre of training over that to the second, and `r W to C` "
        "adds 2 W min(r, C) to the logarithm of the score, which multiplies the angle with exp(W min(r, C)). Here the "
        "form and the strength stay as the library has them, and the other families choose the class part among "
        f"{len(part.candidates)}: none, and {len(CLASS_WEIGHTS)} weights with {len(CAPS)} caps each. {_cells_are(part)}"
    )
    yield ""
    yield from _summary(part, "class part", [part.library, NO_CLASSES])
    yield from _families(part, {part.library: f"library: {part.library}", NO_CLASSES: NO_CLASSES})
    yield "All class parts over all families; the library's is bold."
    yield ""
    yield from head(["weight", *(f"cap {cap:g}" for cap in CAPS)])
    for weight in CLASS_WEIGHTS:
        yield _grid_line(part, f"{weight:g}", [class_name(weight, cap) for cap in CAPS])
    yield ""


def strength_table(part: Part) -> Iterator[str]:
    """What the others choose as the strength of the prior, and how all strengths do on every family."""
    yield "### The strength of the prior alone"
    yield ""
    yield (
        "The form of the rule stays as the library has it, and the other families choose the strength of the prior. "
        f"{_cells_are(part)}"
    )
    yield ""
    yield from _summary(part, "strength", list(part.candidates))
    yield from _families(part, {name: f"strength {name}" for name in part.candidates})


def part_to_json(part: Part) -> dict[str, Any]:
    """The choices, and the figures of all candidates, of four digits."""
    families = sorted(next(iter(part.choices.values())))
    return {
        "library": part.library,
        "choices": {
            by: {"without a say": _rounded(part.without_a_say(by)), "families": chosen}
            for by, chosen in part.choices.items()
        },
        "candidates": {
            name: {
                "mean": _rounded(part.mean(name)),
                "figures of families": {one: round(part.there(name, one)["figure"], 4) for one in families},
                "gaps of families": {one: round(part.there(name, one)["gap"], 4) for one in families},
            }
            for name in part.candidates
        },
    }


def _summary(part: Part, what: str, shown: Sequence[str]) -> Iterator[str]:
    largest = ["mean of the largest gaps"] if _several(part) else []
    yield from head([what, "mean AUROC", "mean gap", *largest])
    for by in part.choices:
        yield line([f"chosen by {BY[by]}, where it had no say", *_figures(part, part.without_a_say(by))])
    for name in shown:
        title = f"**{name}** (library)" if name == part.library else name
        yield line([title, *_figures(part, part.mean(name))])
    for by in part.choices:
        top = min(part.candidates, key=lambda name: part.mean(name)[by])
        yield line([f"best in hindsight by {BY[by]}: {top}", *_figures(part, part.mean(top))])
    yield ""


def _families(part: Part, shown: dict[str, str]) -> Iterator[str]:
    """A line for each family: what the others choose, how that does on it, and the candidates that are shown."""
    chosen = [cell for by in part.choices for cell in (f"the others choose by {BY[by]}", "gap there")]
    yield from head(["family left out", *chosen, *shown.values()])
    for one in sorted(next(iter(part.choices.values()))):
        cells = [cell for of in part.choices.values() for cell in (of[one], _cell(part, part.there(of[one], one)))]
        yield line([one, *cells, *(_cell(part, part.there(name, one)) for name in shown)])
    means = [cell for by in part.choices for cell in ("", _cell(part, part.without_a_say(by)))]
    yield line(["mean", *means, *(_cell(part, part.mean(name)) for name in shown)])
    yield ""


def _grid_line(part: Part, title: str, names: Sequence[str]) -> str:
    cells = [(name, _cell(part, part.mean(name))) for name in names]
    return line([title, *(f"**{cell}**" if name == part.library else cell for name, cell in cells)])


def _several(part: Part) -> bool:
    """Whether an encoder has several questions, so that its largest gap is not its mean gap."""
    return "largest" in part.choices


def _cells_are(part: Part) -> str:
    if _several(part):
        return "Gaps are means over encoders; in brackets stand their largest gaps, averaged in the same way."
    return "Gaps are means over encoders."


def _cell(part: Part, figures: Figures) -> str:
    gap = f"{figures['gap']:.3f}"
    return f"{gap} ({figures['largest']:.3f})" if _several(part) else gap


def _figures(part: Part, figures: Figures) -> list[str]:
    numbers = [figures["figure"], figures["gap"], *([figures["largest"]] if _several(part) else [])]
    return [f"{number:.3f}" for number in numbers]


def _rounded(figures: Figures) -> dict[str, float]:
    return {
        "figure": round(figures["figure"], 4),
        "gap": round(figures["gap"], 4),
        "largest": round(figures["largest"], 4),
    }
