"""The library's own answers beside the best scores of the table: where the targets are met, line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.transfer.gaps import Question, best, class_free, gallery_free, label_free, questions, resolve
from benchmarks.transfer.markdown import head, line
from benchmarks.transfer.results import Result
from benchmarks.transfer.rows import ANSWERS, Needs

__all__ = ["TARGETS", "Met", "Target", "answer_tables", "below_chance", "met"]


@dataclass(frozen=True)
class Target:
    """A largest gap that is wanted.

    Args:
        kind: Kind of the questions, one of :data:`.gaps.KINDS`.
        answer: Key of :data:`.rows.ANSWERS`.
        beside: Name of the rows that the best one is taken of.
        allowed: Which rows these are, by what they keep.
        gap: The largest gap that is wanted.
    """

    kind: str
    answer: str
    beside: str
    allowed: Callable[[str], bool]
    gap: float


_BESIDE: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("gallery-free", gallery_free),
    ("that keeps nothing", class_free),
    ("that keeps classes", lambda needs: needs == Needs.CLASSES),
)

TARGETS = (
    *(Target("match", "retrieval", title, allowed, 0.01) for title, allowed in _BESIDE),
    Target("match", "unlabelled", "without gallery labels", label_free, 0.01),
    Target("match", "gallery", "of all", lambda _: True, 0.01),
    *(Target("unknown", "known", title, allowed, 0.02) for title, allowed in _BESIDE),
    Target("unknown", "gallery", "of all", lambda _: True, 0.01),
    *(Target("harm", "known", title, allowed, 0.02) for title, allowed in _BESIDE),
    Target("harm", "gallery", "of all", lambda _: True, 0.01),
)
"""What is wanted, in the order of the table."""

_ASKED = {"match": "right matches", "unknown": "unknown inputs", "harm": "harmed inputs"}
_MISSES = 10
_SHOWN = {
    "retrieval": "`uncertainty`",
    "known": "`novelty`",
    "gallery": "`RetrievalUncertainty` with labels",
    "unlabelled": "`RetrievalUncertainty`",
}


@dataclass(frozen=True)
class Met:
    """One target over all questions that count and that its answer has a figure for.

    Args:
        target: The target.
        gaps: Figure of the best row minus that of the answer, and the question.
    """

    target: Target
    gaps: list[tuple[float, Question]]

    @property
    def within(self) -> int:
        """How many gaps are as small as wanted."""
        # Figures have four digits: a gap of the target itself is within it.
        return sum(gap <= self.target.gap + 1e-9 for gap, _ in self.gaps)


def met(results: Sequence[Result]) -> list[Met]:
    """Every target."""
    out = []
    for target in TARGETS:
        found = []
        for result in results:
            row = resolve(ANSWERS[target.answer], result)
            for question in questions(result):
                top = best(question, target.allowed)
                if question.kind == target.kind and question.counts and top is not None and row in question.values:
                    found.append((top[1] - question.values[row], question))
        out.append(Met(target, found))
    return out


def below_chance(results: Sequence[Result]) -> tuple[list[str], int]:
    """Encoders whose R-AUROC of ``uncertainty`` is below 0.5, with the figure; and of how many."""
    found = {}
    for result in results:
        row = resolve(ANSWERS["retrieval"], result)
        found |= {q.encoder: q.values[row] for q in questions(result) if q.kind == "match" and row in q.values}
    return [f"{name} ({value:.3f})" for name, value in found.items() if value < 0.5], len(found)


def answer_tables(results: Sequence[Result]) -> Iterator[str]:
    """Lines about the targets, and about every question."""
    yield (
        "What the library says with no option set: `uncertainty` about right matches (R-AUROC), `novelty` about "
        "unknown and harmed inputs (AUROC, harm at the worst level), and with a labelled gallery "
        "`RetrievalUncertainty` about all three; without labels it finds unknown and harmed inputs by the same "
        "threshold, and has a line about right matches. Gap: the best figure of the rows named minus that of the "
        "answer. Questions about unknown and harmed inputs count where the best gallery-free score is above 0.6. Rows "
        "that keep nothing and rows that keep something for each training class are also apart: where the classes in "
        "use are others than in training, as on faces, the second say little."
    )
    yield ""
    yield from head(["answer", "about", "beside the best", "wanted", "met", "mean gap", "largest gap", "at"])
    for one in met(results):
        if not one.gaps:
            continue
        target, (worst, where) = one.target, max(one.gaps, key=lambda pair: pair[0])
        yield line(
            [
                _SHOWN[target.answer],
                _ASKED[target.kind],
                target.beside,
                f"<= {target.gap}",
                f"{one.within} of {len(one.gaps)}",
                f"{sum(gap for gap, _ in one.gaps) / len(one.gaps):.3f}",
                f"{worst:.3f}",
                f"{where.encoder} {where.item}".strip(),
            ]
        )
    low, count = below_chance(results)
    yield line(
        [
            _SHOWN["retrieval"],
            _ASKED["match"],
            "chance",
            ">= 0.5",
            f"{count - len(low)} of {count}",
            "",
            "",
            ", ".join(low),
        ]
    )
    yield ""
    yield (
        f"Where they are missed by most, at most {_MISSES} questions for each of the lines above that compare with all "
        "gallery-free scores or with all:"
    )
    yield ""
    yield from head(["answer", "beside the best", "encoder", "question", "answer", "best", "gap"])
    titles = {(result["name"], name): row["title"] for result in results for name, row in result["rows"].items()}
    for one in met(results):
        if one.target.allowed is gallery_free or one.target.answer == "gallery":
            yield from (line(cells) for cells in _misses(one, titles))
    yield ""
    yield from _flagged(results)


def _flagged(results: Sequence[Result]) -> Iterator[str]:
    """Shares of p-values that are at most alpha."""
    some = [result for result in results if result.get("flagged")]
    if not some:
        return
    alphas = list(next(iter(some[0]["flagged"]["training"].values())))
    yield (
        "Share of the known test inputs, and mean share of the unknown inputs, whose p-value is at most alpha. "
        "Relative to training inputs, p-values are optimistic; relative to calibration inputs that the encoder was not "
        "trained on, at most a share alpha of the known ones is flagged, up to binomial error."
    )
    yield ""
    heads = [f"{what}, alpha = {alpha}" for alpha in alphas for what in ("known", "unknown")]
    yield from head(["encoder", "relative to", *heads])
    for result in some:
        for reference, sets in result["flagged"].items():
            cells = [result["name"], reference]
            for alpha in alphas:
                unknown = [shares[alpha] for name, shares in sets.items() if name != "test"]
                cells.append(f"{sets['test'][alpha]:.3f}")
                cells.append(f"{sum(unknown) / len(unknown):.3f}" if unknown else "")
            yield line(cells)
    yield ""


def _misses(one: Met, titles: dict[tuple[str, str], str]) -> Iterator[list[str]]:
    missed = sorted((pair for pair in one.gaps if pair[0] > one.target.gap + 1e-9), key=lambda pair: -pair[0])
    for gap, question in missed[:_MISSES]:
        top = best(question, one.target.allowed)
        assert top is not None
        shown = f"{top[1]:.3f} {titles[question.encoder, top[0]]}"
        item = "right match" if question.kind == "match" else question.item
        cells = [_SHOWN[one.target.answer], one.target.beside, question.encoder, item]
        yield [*cells, f"{top[1] - gap:.3f}", shown, f"{gap:.3f}"]
