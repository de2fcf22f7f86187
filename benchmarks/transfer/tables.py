"""The results as Markdown: one table an encoder, and the summary over all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.machine import table
from benchmarks.transfer.figures import REJECTED
from benchmarks.transfer.results import Result
from benchmarks.transfer.rows import ANSWERS, Needs, resolve

_LEGEND = (
    "R-AUROC: AUROC of the score for a wrong nearest neighbour, leave-one-out among the test inputs; 0.5 is chance. "
    "AUSC: mean precision at 1 while the least certain queries are rejected. Unknown inputs: AUROC (AUPRC in the JSON "
    "files). Corruption: Spearman's correlation of level and score; in brackets the AUROC of the score for the inputs "
    "at level 3 and at the worst level, among the same clean inputs. Bold: the best of the gallery-free scores, "
    "which keep the posterior, constants or something for each class; in italics a gallery score that is better."
)


_LEAST = 0.6
"""Where no gallery-free score reaches this AUROC, nothing is to be seen, and no gap is counted."""


def gallery_free(needs: str) -> bool:
    """Whether a row does without training inputs and without the gallery."""
    return needs not in (Needs.GALLERY, Needs.LABELS)


Beside = tuple[str, Callable[[str], bool]]
"""What rows are called that an answer is compared with, and which they are by what they keep."""

_ALL: Beside = ("of all", lambda _: True)
_FREE: tuple[Beside, ...] = (
    ("gallery-free", gallery_free),
    ("that keeps nothing", lambda needs: needs == Needs.NOTHING),
    ("that keeps classes", lambda needs: needs == Needs.CLASSES),
)

TARGETS: tuple[tuple[str, str, Beside, float], ...] = (
    *(("match", "retrieval", beside, 0.01) for beside in _FREE),
    ("match", "unlabelled", ("without gallery labels", lambda needs: needs != Needs.LABELS), 0.01),
    ("match", "gallery", _ALL, 0.01),
    *(("unknown", "known", beside, 0.02) for beside in _FREE),
    ("unknown", "gallery", _ALL, 0.01),
    *(("corruption", "known", beside, 0.02) for beside in _FREE),
    ("corruption", "gallery", _ALL, 0.01),
)
"""Kind of question, key of :data:`.rows.ANSWERS`, what it is compared with, and the largest gap that is wanted."""

_ASKED = {"match": "right matches", "unknown": "unknown inputs", "corruption": "corrupted inputs"}
_SHOWN = {
    "retrieval": "`uncertainty`",
    "known": "`novelty`",
    "gallery": "`RetrievalUncertainty` with labels",
    "unlabelled": "`RetrievalUncertainty`",
}


def encoder_table(result: Result) -> str:
    """Every row of one encoder."""
    sizes, pairs = result["sizes"], result.get("pairs")
    counts = ", ".join(f"{sizes[name]:,} {name}" for name in ("train", "classes", "test", "features"))
    verified = ""
    if pairs is not None:
        verified = f" Pairs: {pairs['pairs']:,}, accuracy {pairs['accuracy']:.4f}, true-accept rate at a false-accept "
        verified += f"rate of 1e-3 {pairs['true_accept']:.4f}."
        if "new_people" in pairs:
            verified += f" The {pairs['new_people']:,} pairs of people who are not in training: "
            verified += f"accuracy {pairs['accuracy_new_people']:.4f}."
    columns = _columns(result)
    free = {name for name, row in result["rows"].items() if gallery_free(row["needs"])}
    lines = [
        [row["title"], "" if row["needs"] == Needs.NOTHING else row["needs"]]
        + [_marked(name, column, free) for column in columns.values()]
        for name, row in result["rows"].items()
    ]
    parts = [
        f"# {result['title']}",
        f"`{result['name']}`: {counts}, D = {sizes['dim']}; mAP@1 {result['map_at_1']:.3f}.{verified}",
        table(["score", "keeps", *columns], lines),
    ]
    parts += [
        f"The fit of `{structure}` warns that its score says little more than the norm of the features."
        for structure in result["warned"]
    ]
    left_out = [
        f"{', '.join(f'`{name}`' for name, given in result['skipped'].items() if given == reason)} ({reason})"
        for reason in dict.fromkeys(result["skipped"].values())
    ]
    return "\n\n".join([*parts, *([f"Left out: {' '.join(left_out)}"] if left_out else []), _LEGEND])


def summary(results: Sequence[Result]) -> str:
    """All encoders: gaps, how far the library's answers are from the best scores, and a line for each encoder."""
    machines = {f"{m['cpu']}, {m['threads']} threads, torch {m['torch']}" for m in (one["machine"] for one in results)}
    parts = [
        "# Does the answer transfer?",
        f"Written by `python -m benchmarks.transfer` from the files in `transfer/`: {len(results)} encoders. Machine: "
        f"{'; '.join(sorted(machines)) or 'none'}. Known inputs are the test inputs; "
        "each is retrieved among the others.",
        _LEGEND,
        "## Gaps to the best gallery-free score",
        "Over all encoders. Gap: AUROC of the best gallery-free score minus this one's, mean and largest; below zero "
        "where this one is better. Unknown and corrupted inputs count where the best is above 0.6; n is how many "
        "questions a score answers.",
        _gap_table(results),
        "## The library's answers",
        "What the library says with no option set: `uncertainty` about right matches (R-AUROC), `novelty` about "
        "unknown and corrupted inputs (AUROC, corruption at the worst level), and with a labelled gallery "
        "`RetrievalUncertainty` about all three, until `cc.Retriever` took its place; without labels it found unknown "
        "and corrupted inputs by the same threshold, and has a line about right matches. Gap: the best figure of the "
        "rows named minus that of the answer. Where the classes in use are others than in training, as on faces, rows "
        "that keep something for each training class say little.",
        _target_table(results),
        "## Encoders",
        "With all rows of each.",
        table(
            ["encoder", "mAP@1"],
            [[f"[{result['name']}](transfer/{result['name']}.md)", f"{result['map_at_1']:.3f}"] for result in results],
        ),
    ]
    return "\n\n".join(parts) + "\n"


class Question(NamedTuple):
    """One column of figures.

    Args:
        encoder: Its name.
        kind: ``"match"``: is the nearest neighbour right (R-AUROC)? ``"unknown"``: is the input unknown (AUROC)?
            ``"corruption"``: is it corrupted (AUROC, worst level)?
        item: Name of the unknown, or kind and level of the corruption; empty for matches.
        values: Row -> figure, larger is better.
        needs: Row -> what it keeps.
    """

    encoder: str
    kind: str
    item: str
    values: dict[str, float]
    needs: dict[str, str]

    @property
    def where(self) -> str:
        return f"{self.encoder} {self.item}".strip()

    def best(self, allowed: Callable[[str], bool]) -> float | None:
        """The best figure of the rows that keep what is allowed."""
        return max((value for name, value in self.values.items() if allowed(self.needs[name])), default=None)


def questions(result: Result) -> Iterator[Question]:
    """The questions of one encoder that count: all about matches, others if a gallery-free score sees something."""
    rows = result["rows"]
    needs = {name: row["needs"] for name, row in rows.items()}
    columns: dict[tuple[str, str], dict[str, float]] = {}
    for name, row in rows.items():
        if row["r_auroc"] is not None:
            columns.setdefault(("match", ""), {})[name] = row["r_auroc"]
        for unknown, figures in row["unknown"].items():
            columns.setdefault(("unknown", unknown), {})[name] = figures["auroc"]
        for kind, figures in row.get("corruption", {}).items():
            level = max(figures["auroc"], key=int)
            columns.setdefault(("corruption", f"{kind} {level}"), {})[name] = figures["auroc"][level]
    for (kind, item), values in columns.items():
        question = Question(result["name"], kind, item, values, needs)
        top = question.best(gallery_free)
        if top is not None and (kind == "match" or top > _LEAST):
            yield question


def _gap_table(results: Sequence[Result]) -> str:
    asked = [question for result in results for question in questions(result)]
    titles = {"match": "R-AUROC", "unknown": "unknown, AUROC", "corruption": "worst corruption, AUROC"}
    columns = [name for title in titles.values() for name in (f"{title}: n", "mean", "gap", "largest", "at")]
    # In the order of the longest result: an encoder may lack a row in the middle.
    rows = {name: row for result in results for name, row in result["rows"].items()}
    longest = max(results, key=lambda result: len(result["rows"]), default={"rows": {}})["rows"]
    lines = []
    for name in dict.fromkeys([*longest, *rows]):
        cells = [rows[name]["title"], rows[name]["needs"]]
        for kind in titles:
            of = [question for question in asked if question.kind == kind and name in question.values]
            # Below zero where the row is better.
            apart = [(question.best(gallery_free) or 0) - question.values[name] for question in of]
            if not of:
                cells += ["0", "", "", "", ""]
                continue
            means = [math.fsum(question.values[name] for question in of) / len(of), math.fsum(apart) / len(of)]
            worst = max(range(len(of)), key=lambda k: apart[k])
            cells += [str(len(of)), *(f"{value:.3f}" for value in (*means, apart[worst])), of[worst].where]
        correlations = [
            figures["spearman"]
            for result in results
            if name in result["rows"]
            for figures in result["rows"][name].get("corruption", {}).values()
        ]
        lines.append([*cells, f"{statistics.fmean(correlations):.3f}" if correlations else ""])
    return table(["score", "keeps", *columns, "corruption, Spearman"], lines)


def _target_table(results: Sequence[Result]) -> str:
    """How many questions every answer is close to the best for."""
    asked = [(result, question) for result in results for question in questions(result)]
    lines = []
    for kind, answer, (beside, allowed), wanted in TARGETS:
        apart = []
        for result, question in asked:
            row, top = resolve(ANSWERS[answer], result), question.best(allowed)
            if question.kind == kind and top is not None and row in question.values:
                apart.append((top - question.values[row], question.where))
        if apart:
            worst, where = max(apart)
            # Figures have four digits: a gap of the target itself is within it.
            within = sum(gap <= wanted + 1e-9 for gap, _ in apart)
            cells = [_SHOWN[answer], _ASKED[kind], beside, f"<= {wanted}", f"{within} of {len(apart)}"]
            lines.append([*cells, f"{statistics.fmean(gap for gap, _ in apart):.3f}", f"{worst:.3f}", where])
    own = [
        (question.values[row], result["name"])
        for result, question in asked
        if question.kind == "match" and (row := resolve(ANSWERS["retrieval"], result)) in question.values
    ]
    low = [f"{name} ({value:.3f})" for value, name in own if value < 0.5]
    cells = [_SHOWN["retrieval"], _ASKED["match"], "chance", ">= 0.5", f"{len(own) - len(low)} of {len(own)}"]
    lines.append([*cells, "", "", ", ".join(low)])
    return table(["answer", "about", "beside the best", "wanted", "met", "mean gap", "largest gap", "at"], lines)


def _columns(result: Result) -> dict[str, dict[str, tuple[str, float | None]]]:
    """Column -> row -> cell, and the figure that the best one is found by, larger is better."""
    out: dict[str, dict[str, tuple[str, float | None]]] = {}
    for name, row in result["rows"].items():
        auroc = {"R-AUROC": row["r_auroc"], "AUSC": row["ausc"]}
        auroc |= {f"unknown: {unknown}": figures["auroc"] for unknown, figures in row["unknown"].items()}
        cells = {column: ("" if value is None else f"{value:.3f}", value) for column, value in auroc.items()}
        for kind, figures in row.get("corruption", {}).items():
            levels = [level for level in ("3", max(figures["auroc"], key=int)) if level in figures["auroc"]]
            aurocs = ", ".join(f"{figures['auroc'][level]:.3f}" for level in dict.fromkeys(levels))
            cells[f"corruption: {kind}"] = (f"{figures['spearman']:.3f} ({aurocs})", figures["spearman"])
        for combined, figures in row.get("pairs", {}).items():
            error = figures["error_at"][0]
            cells[f"pairs, {combined}: error, {REJECTED[0]:.0%} rejected"] = (f"{error:.4f}", -error)
        for column, cell in cells.items():
            out.setdefault(column, {})[name] = cell
    return out


def _marked(name: str, column: dict[str, tuple[str, float | None]], free: set[str]) -> str:
    """The cell of a row, with the mark of the best gallery-free one, or of a gallery score that is better."""
    shown, value = column[name]
    top = max((key for row, (_, key) in column.items() if row in free and key is not None), default=None)
    if top is None or value is None or value < top:
        return shown
    return f"**{shown}**" if name in free else f"*{shown}*" if value > top else shown
