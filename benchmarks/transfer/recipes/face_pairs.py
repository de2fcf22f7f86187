"""The 6,000 pairs of faces on which LFW is compared, in their ten folds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.experiments.data.files import read_lines
from contrastive_curvature.errors import InputError, expected

_HOW = "Get pairs.txt from http://vis-www.cs.umass.edu/lfw/."
Face = tuple[str, int]
"""A person's name and the number of the image, from one."""


@dataclass(frozen=True)
class FacePair:
    """Two images.

    Args:
        left: One.
        right: The other.
        fold: From 0.
    """

    left: Face
    right: Face
    fold: int

    @property
    def same(self) -> bool:
        """Whether both show the same person."""
        return self.left[0] == self.right[0]


def read_pairs(path: Path) -> list[FacePair]:
    """Read ``pairs.txt``.

    The first line has the number F of folds and the number P of pairs of one kind in a fold; then every fold has P
    lines ``NAME NUMBER NUMBER`` (the same person) and P lines ``NAME NUMBER NAME NUMBER`` (two people).

    Args:
        path: The file.

    Returns:
        2 F P pairs in the file's order.

    Raises:
        InputError: It is not such a file.
    """
    head, *rest = (line.split() for line in read_lines(path, _HOW))
    if len(head) != 2 or not all(word.isdecimal() and int(word) > 0 for word in head):
        raise InputError(expected(str(path), "numbers of folds and of pairs in the first line", " ".join(head), _HOW))
    folds, each = map(int, head)
    if len(rest) != 2 * folds * each:
        raise InputError(expected(str(path), f"{2 * folds * each} pairs, as its first line states", len(rest), _HOW))
    return [_pair(path, words, row // (2 * each), same=row % (2 * each) < each) for row, words in enumerate(rest)]


def _pair(path: Path, words: list[str], fold: int, same: bool) -> FacePair:
    left, right = words[:2], [words[0], *words[2:]] if same else words[2:]
    good = len(left) == len(right) == 2 and left[1].isdecimal() and right[1].isdecimal()
    if not good or (left[0] == right[0]) is not same:
        wanted = "NAME NUMBER NUMBER" if same else "NAME NUMBER NAME NUMBER, of two people,"
        raise InputError(expected(str(path), f"{wanted} in fold {fold + 1}", " ".join(words), _HOW))
    return FacePair((left[0], int(left[1])), (right[0], int(right[1])), fold)
