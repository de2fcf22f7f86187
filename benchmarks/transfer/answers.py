"""The library's own answers beside the best scores of the table: how often they are within the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from benchmarks.transfer.gaps import KINDS, Question, best, class_free, gallery_free, questions, resolve
from benchmarks.transfer.markdown import head, line
from benchmarks.transfer.results import Result
from benchmarks.transfer.rows import ANSWERS

__all__ = ["answer_tables"]

_REFERENCES: tuple[tuple[str, Callable[[str], bool], bool], ...] = (
    ("best that keeps nothing", class_free, False),
    ("best gallery-free", gallery_free, False),
    ("best of all", lambda _: True, True),
)
"""Title, the rows that it is the best of, and whether the answer beside it may use the gallery."""


_ASKED = {"match": "right matches", "unknown": "unknown inputs", "harm": "harmed inputs"}


def answer_tables(results: Sequence[Result]) -> Iterator[str]:
    """Lines about how often the answers are near the best scores, and about every question."""
    yield (
        "What the library says with no option set, beside the best scores of three kinds: those that keep nothing for "
        "a class or an input; all gallery-free ones; and, where the answer may use a gallery too, all. Only questions "
        "of the table above. Wanted: a gap of at most 0.01 for right matches, 0.02 for unknown and harmed inputs, 0.01 "
        "with a gallery; and a score for right matches that is not below chance."
    )
    yield ""
    columns = ["encoder", "question", "answer"]
    for title, _, gallery in _REFERENCES:
        columns += ["with a gallery"] * gallery + [title, "gap"]
    lines: list[list[str]] = []
    gaps: dict[tuple[str, str], list[float]] = {}
    chance = []
    for result in results:
        for question in questions(result):
            if not question.counts:
                continue
            match = question.kind == "match"
            plain = resolve(ANSWERS["retrieval" if match else "known"], result)
            if match and plain in question.values:
                chance.append(question.values[plain])
            cells = [result["name"], "right match" if match else question.item, _value(question, plain)]
            for title, allowed, gallery in _REFERENCES:
                row, top = ANSWERS["gallery"] if gallery else plain, best(question, allowed)
                cells += [_value(question, row)] * gallery
                if top is None or row not in question.values:
                    cells += ["", ""]
                    continue
                gap = top[1] - question.values[row]
                gaps.setdefault((question.kind, title), []).append(gap)
                cells += [f"{top[1]:.3f} {result['rows'][top[0]]['title']}", f"{gap:.3f}"]
            lines.append(cells)
    yield from head(["answer", "beside", "n", "within the target", "mean gap", "largest"])
    for asked, title in product(KINDS, (title for title, _, _ in _REFERENCES)):
        found = gaps.get((asked, title), [])
        if not found:
            continue
        target = 0.02 if asked != "match" and title != _REFERENCES[-1][0] else 0.01
        # Figures have four digits: a gap of the target itself is within it.
        within = sum(gap <= target + 1e-9 for gap in found)
        cells = [
            _ASKED[asked],
            title,
            str(len(found)),
            str(within),
            f"{sum(found) / len(found):.3f}",
            f"{max(found):.3f}",
        ]
        yield line(cells)
    yield ""
    if chance:
        yield f"Right matches below chance: {sum(value < 0.5 for value in chance)} of {len(chance)} encoders."
        yield ""
    yield from head(columns)
    yield from (line(cells) for cells in lines)


def _value(question: Question, row: str) -> str:
    return f"{question.values[row]:.3f}" if row in question.values else "not there"
