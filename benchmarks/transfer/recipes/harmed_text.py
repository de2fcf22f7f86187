"""Text made worse by degrees: two kinds of harm, each at five strengths."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

import numpy as np

from contrastive_curvature.errors import InputError, expected

_TYPOS = (0.04, 0.08, 0.14, 0.22, 0.35)
"""Share of the letters that are edited."""
_DELETED = (0.15, 0.30, 0.45, 0.60, 0.80)
"""Share of the words that are removed."""


def harm_text(texts: Sequence[str], kind: str, level: int, seed: int) -> list[str]:
    """Make texts worse.

    Which letters and words are hit, and in which order, depends on the text, the seed and the kind alone: what a level
    does to a text, the next level does, too, and more.

    Args:
        texts: The texts.
        kind: ``"typos"``: 4 to 35 % of the letters are each replaced, removed, doubled or swapped with the next one.
            ``"deletion"``: 15 to 80 % of the words are removed, but for one. At least one letter or word is hit.
        level: 1 to 5.
        seed: Of what is random.

    Returns:
        The harmed texts. Words of a text come back with single spaces between them.

    Raises:
        InputError: An argument is out of range.
    """
    if kind not in TEXT_KINDS:
        raise InputError(expected("kind", f"one of {', '.join(TEXT_KINDS)}", kind))
    if isinstance(level, bool) or level not in range(1, len(_TYPOS) + 1):
        raise InputError(expected("level", f"a whole number from 1 to {len(_TYPOS)}", level))
    number = TEXT_KINDS.index(kind)
    return [_HARMS[kind](text, level - 1, np.random.default_rng((seed, number, row))) for row, text in enumerate(texts)]


def _deletion(text: str, at: int, rng: np.random.Generator) -> str:
    words = text.split()
    removed = min(len(words) - 1, max(1, round(_DELETED[at] * len(words))))
    gone = set(rng.permutation(len(words))[: max(0, removed)].tolist())
    return " ".join(word for place, word in enumerate(words) if place not in gone)


def _typos(text: str, at: int, rng: np.random.Generator) -> str:
    letters = list(" ".join(text.split()))
    places = [place for place, letter in enumerate(letters) if letter != " "]
    # All that is random is drawn first, so that a level's edits are the first of the next level's.
    order, edits = rng.permutation(len(places)), rng.integers(4, size=len(places))
    new = rng.choice(list(string.ascii_lowercase), size=len(places))
    for number in order[: max(1, round(_TYPOS[at] * len(places)))].tolist():
        place, letter = places[number], letters[places[number]]
        following = letters[place + 1] if place + 1 < len(letters) else ""
        letters[place] = (str(new[number]), "", letter * 2, following + letter)[edits[number]]
        if edits[number] == 3 and following:
            letters[place + 1] = ""
    return "".join(letters)


_HARMS: dict[str, Callable[[str, int, np.random.Generator], str]] = {"typos": _typos, "deletion": _deletion}
TEXT_KINDS = tuple(_HARMS)
"""Names of the harms."""
