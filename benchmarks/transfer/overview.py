"""One line for each encoder: the library's answers, beside the best scores of three kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.transfer.gaps import KINDS, Question, best, class_free, gallery_free, questions, resolve
from benchmarks.transfer.markdown import head, line
from benchmarks.transfer.results import Result
from benchmarks.transfer.rows import ANSWERS

__all__ = ["overview"]

_TITLES = {"match": "R-AUROC", "unknown": "unknown", "harm": "harm"}
_GALLERY = {"unlabelled": "`RetrievalUncertainty`", "gallery": "`RetrievalUncertainty` with labels"}


def overview(results: Sequence[Result]) -> Iterator[str]:
    """A table with a line for each encoder."""
    columns = [
        f"{_TITLES[kind]}: {what}"
        for kind in KINDS
        for what in (
            "`uncertainty`" if kind == "match" else "`novelty`",
            "best that keeps nothing",
            "best gallery-free",
            *(_GALLERY[name] for name in _gallery(kind)),
            "best of all",
        )
    ]
    yield from head(["encoder", "mAP@1", *columns])
    for result in results:
        asked = [question for question in questions(result) if question.counts]
        cells = [f"`{result['name']}`", f"{result['map_at_1']:.3f}"]
        for kind in KINDS:
            cells += _of_kind(result, kind, [question for question in asked if question.kind == kind])
        yield line(cells)


def _of_kind(result: Result, kind: str, asked: Sequence[Question]) -> list[str]:
    row = resolve(ANSWERS["retrieval" if kind == "match" else "known"], result)
    return [
        _mean([question.values.get(row) for question in asked]),
        *(_mean([_best(question, allowed) for question in asked]) for allowed in (class_free, gallery_free)),
        *(_mean([question.values.get(ANSWERS[name]) for question in asked]) for name in _gallery(kind)),
        _mean([_best(question, lambda _: True) for question in asked]),
    ]


def _gallery(kind: str) -> list[str]:
    """Answers with a gallery. Its labels change the order of known inputs, and not which inputs are called unknown."""
    return [name for name in _GALLERY if kind == "match" or name == "gallery"]


def _best(question: Question, allowed: Callable[[str], bool]) -> float | None:
    found = best(question, allowed)
    return None if found is None else found[1]


def _mean(figures: Sequence[float | None]) -> str:
    """Nothing where one is missing: means over different questions could not be compared."""
    found = [figure for figure in figures if figure is not None]
    return f"{sum(found) / len(found):.3f}" if found and len(found) == len(figures) else ""
