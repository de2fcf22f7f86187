"""The inputs that are shown: a picture, a text or a name, with what was predicted for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contrastive_curvature.apps.report.missing import Missing
from contrastive_curvature.apps.report.retrieval import Search
from contrastive_curvature.apps.report.scored import Scored

__all__ = ["Card", "Group", "groups_of"]

ClassNames = Mapping[int, str] | Sequence[str] | None


@dataclass(frozen=True)
class Card:
    """One input.

    Attributes:
        name: Its id, or its position in the data.
        item: A text, an image or a path of one; ``None`` where nothing is known but the name.
        label: Name of its class, where it has one.
        match: Name of its nearest neighbour's class, where it was searched.
        right: Whether that is its class; ``None`` where that is not known, or nothing of its class is there to find.
        uncertainty: In radians.
        p_value: Where there is one.
    """

    name: str
    item: Any
    label: str | None
    match: str | None
    right: bool | None
    uncertainty: float
    p_value: float | None


@dataclass(frozen=True)
class Group:
    """Inputs that are shown together.

    Attributes:
        title: Of the group.
        text: What they have in common, a sentence.
        cards: The inputs, the most extreme first.
    """

    title: str
    text: str
    cards: tuple[Card, ...]


def groups_of(
    test: Scored, unknown: Scored | None, gallery: Scored | None, found: Search | Missing, names: ClassNames
) -> tuple[Group, ...]:
    """The most and the least certain test inputs, and those that a threshold flags first and last."""

    def cards(scored: Scored, which: str) -> tuple[Card, ...]:
        chosen = scored.shortlists[which]
        return tuple(
            _card(scored, row, item, found if scored is test else None, gallery, names)
            for row, item in zip(chosen.rows, chosen.previews, strict=True)
        )

    all_groups = [
        Group("Most certain", "The smallest uncertainty: few errors should be here.", cards(test, "certain")),
        Group("Least certain", "The largest uncertainty: errors should gather here.", cards(test, "uncertain")),
        Group(
            "Known, but unusual",
            "Known test inputs with the largest novelty: a threshold flags them first, by mistake.",
            cards(test, "unusual"),
        ),
    ]
    if unknown is not None:
        text = "Unknown inputs with the smallest novelty: a threshold misses them first."
        all_groups.append(Group("Unknown, but usual", text, cards(unknown, "usual")))
    return tuple(group for group in all_groups if group.cards)


def _card(
    scored: Scored, row: int, item: Any, found: Search | Missing | None, gallery: Scored | None, names: ClassNames
) -> Card:
    if scored.data.items is not None:
        item = scored.data.items[row]
    label = None if scored.labels is None else class_name(int(scored.labels[row]), names)
    match = right = None
    if isinstance(found, Search):
        labels = scored.labels if gallery is None else gallery.labels
        if labels is not None:
            match = class_name(int(labels[found.first[row]]), names)
        right = bool(found.right[row]) if int(found.ranking.n_positives[row]) else None
    p_value = None if isinstance(scored.p_value, Missing) else float(scored.p_value[row])
    return Card(scored.data.name(row), item, label, match, right, float(scored.uncertainty[row]), p_value)


def class_name(label: int, names: ClassNames) -> str:
    """The name of a class, or its number where it has none."""
    if isinstance(names, Mapping):
        return str(names.get(label, label))
    if names is not None and 0 <= label < len(names):
        return str(names[label])
    return str(label)
