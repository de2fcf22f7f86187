"""Images and texts made worse by degrees: five kinds of corruption and two, each at five strengths."""

from __future__ import annotations

import string
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Images = NDArray[np.uint8]

LEVELS = (1, 2, 3, 4, 5)
"""Strengths; 5 is the worst."""

KINDS = ("blur", "noise", "occlusion", "contrast", "rotation")
"""Names of the corruptions."""
_BLUR = (0.02, 0.04, 0.06, 0.09, 0.13)
_NOISE = (0.05, 0.10, 0.18, 0.28, 0.40)
_SQUARE = (0.20, 0.32, 0.44, 0.56, 0.70)
_CONTRAST = (0.70, 0.50, 0.33, 0.20, 0.08)
_DEGREES = (10.0, 20.0, 35.0, 55.0, 85.0)
_GREY = 128.0


def corrupt(images: Images, kind: str, level: int, seed: int) -> Images:
    """Make images worse.

    What is drawn at random (noise, place of the square, sense of the turn) depends on the seed and the kind alone, so
    that the five levels of one image differ in their strength and in nothing else.

    Args:
        images: Grey values (N, H, W), or (N, H, W, C) with channels; sides of at least 8 pixels.
        kind: ``"blur"``: Gaussian, its standard deviation 2 to 13 % of the shorter side. ``"noise"``: Gaussian, its
            standard deviation 5 to 40 % of white. ``"occlusion"``: a grey square of 20 to 70 % of the shorter side,
            within the image. ``"contrast"``: 70 to 8 % of the distance to the image's mean. ``"rotation"``: by 10 to 85
            degrees to either side, the edge repeated.
        level: 1 to 5.
        seed: Of what is random.

    Returns:
        uint8, of the same shape.
    """
    rng, changed = np.random.default_rng((seed, KINDS.index(kind))), np.empty_like(images)
    shape, at = images.shape[1:3], level - 1
    for row, image in enumerate(images.astype(np.float32)):
        match kind:
            case "blur":
                new = ndimage.gaussian_filter(image, _BLUR[at] * min(shape), mode="nearest", axes=(0, 1))
            case "noise":
                new = image + 255 * _NOISE[at] * rng.standard_normal(image.shape, dtype=np.float32)
            case "occlusion":
                side = max(1, round(_SQUARE[at] * min(shape)))
                # A point of the unit square, not of the pixels: each level's square then lies within the next one's.
                top, left = (int(part * (length - side + 1)) for part, length in zip(rng.random(2), shape, strict=True))
                new = image
                new[top : top + side, left : left + side] = _GREY
            case "contrast":
                new = image.mean() + _CONTRAST[at] * (image - image.mean())
            case _:
                degrees = _DEGREES[at] * rng.choice((-1, 1))
                new = ndimage.rotate(image, degrees, axes=(0, 1), reshape=False, order=1, mode="nearest")
        changed[row] = np.clip(np.rint(new), 0, 255)
    return changed


TEXT_KINDS = ("typos", "deletion")
"""Names of the corruptions of text."""
_TYPOS = (0.04, 0.08, 0.14, 0.22, 0.35)
"""Share of the letters that are edited."""
_DELETED = (0.15, 0.30, 0.45, 0.60, 0.80)
"""Share of the words that are removed."""


def corrupt_text(texts: Sequence[str], kind: str, level: int, seed: int) -> list[str]:
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
        The corrupted texts. Words of a text come back with single spaces between them.
    """
    worse, number = {"typos": _typos, "deletion": _deletion}[kind], TEXT_KINDS.index(kind)
    return [worse(text, level - 1, np.random.default_rng((seed, number, row))) for row, text in enumerate(texts)]


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
