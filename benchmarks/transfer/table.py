"""The results as Markdown: one table an encoder, and the summary over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.transfer.answers import answer_tables
from benchmarks.transfer.figures import REJECTED
from benchmarks.transfer.gaps import KINDS, Question, gallery_free, questions, summarise
from benchmarks.transfer.markdown import head, line
from benchmarks.transfer.overview import overview
from benchmarks.transfer.results import Result
from benchmarks.transfer.rows import Needs

__all__ = ["encoder_table", "summary"]

_LEGEND = (
    "R-AUROC: AUROC of the score for a wrong nearest neighbour, leave-one-out among the test inputs; 0.5 is chance. "
    "AUSC: mean precision at 1 while the least certain queries are rejected. Unknown inputs: AUROC (AUPRC in the JSON "
    "files). Harm: Spearman's correlation of level and score; in brackets the AUROC of the score for the inputs at "
    "level 3 and at the worst level, among the same inputs unharmed. Bold: the best of the gallery-free scores, "
    "which keep the posterior, constants or something for each class; in italics a gallery score that is better."
)


def encoder_table(result: Result) -> str:
    """Every row of one encoder."""
    return "\n".join([*_encoder(result), "", _LEGEND])


def summary(results: Sequence[Result]) -> str:
    """All encoders: gaps, how far the library's answers are from the best scores, and a line for each encoder."""
    asked = [question for result in results for question in questions(result)]
    machines = sorted({_machine(result) for result in results})
    lines = [
        "# Does the answer transfer?",
        "",
        f"Written by `python -m benchmarks.transfer` from the files in `transfer/`: {len(results)} encoders. Machine: "
        f"{'; '.join(machines) or 'none'}. Known inputs are the test inputs; each is retrieved among the others.",
        "",
        _LEGEND,
        "",
        "## Gaps to the best gallery-free score",
        "",
        "Over all encoders. Gap: AUROC of the best gallery-free score minus this one's, mean and largest; below zero "
        "where this one is better. Unknown and harmed inputs count where the best is above 0.6; n is how many "
        "questions a score answers.",
        "",
        *_gap_table(results, asked),
        "",
        "## The library's answers",
        "",
        *answer_tables(results),
        "",
        "## Encoders",
        "",
        "The answers beside the best of the others; means over the unknown and harmed inputs that count. All rows of "
        "an encoder are in `transfer/NAME.md`.",
        "",
        *overview(results),
        "",
    ]
    return "\n".join(lines)


def _machine(result: Result) -> str:
    machine = result["machine"]
    return f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}"


def _gap_table(results: Sequence[Result], asked: Sequence[Question]) -> Iterator[str]:
    titles = {"match": "R-AUROC", "unknown": "unknown, AUROC", "harm": "worst harm, AUROC"}
    columns = [f"{titles[kind]}: n | mean | gap | largest | at" for kind in KINDS]
    yield from head(["score", "keeps", *" | ".join(columns).split(" | "), "harm, Spearman"])
    rows = {name: row for result in results for name, row in result["rows"].items()}
    for name, row in _in_order(rows, results):
        cells = [row["title"], row["needs"]]
        for kind in KINDS:
            gaps = summarise(asked, name, kind)
            cells += (
                ["0", "", "", "", ""]
                if gaps is None
                else [str(gaps.asked), *(f"{v:.3f}" for v in (gaps.mean, gaps.gap, gaps.worst)), gaps.where]
            )
        found = [
            figures["spearman"]
            for result in results
            if name in result["rows"]
            for figures in result["rows"][name].get("harm", {}).values()
        ]
        yield line([*cells, f"{sum(found) / len(found):.3f}" if found else ""])


def _in_order(rows: dict[str, Any], results: Sequence[Result]) -> Iterable[tuple[str, Any]]:
    """Rows in the order of the longest result: an encoder may lack one in the middle."""
    longest = max(results, key=lambda result: len(result["rows"]), default={"rows": {}})["rows"]
    return ((name, rows[name]) for name in dict.fromkeys([*longest, *rows]))


def _encoder(result: Result) -> Iterator[str]:
    sizes = dict(result["sizes"])
    counts = ", ".join(f"{sizes[name]:,} {name}" for name in ("train", "classes", "test", "features"))
    yield f"# {result['title']}"
    yield ""
    pairs = result.get("pairs")
    verified = ""
    if pairs is not None:
        verified = f" Pairs: {pairs['pairs']:,}, accuracy {pairs['accuracy']:.4f}, true-accept rate at a false-accept "
        verified += f"rate of 1e-3 {pairs['true_accept']:.4f}."
        if "new_people" in pairs:
            verified += f" The {pairs['new_people']:,} pairs of people who are not in training: "
            verified += f"accuracy {pairs['accuracy_new_people']:.4f}."
    yield f"`{result['name']}`: {counts}, D = {sizes['dim']}; mAP@1 {result['map_at_1']:.3f}.{verified}"
    yield ""
    columns = _columns(result)
    yield from head(["score", "keeps", *columns])
    free = {name for name, row in result["rows"].items() if gallery_free(row["needs"])}
    for name, row in result["rows"].items():
        cells = [row["title"], "" if row["needs"] == Needs.NOTHING else row["needs"]]
        for figures in columns.values():
            shown, key, larger = figures[name]
            cells.append(shown if key is None else _marked(shown, key, name, figures, free, larger))
        yield line(cells)
    for structure in result["warned"]:
        yield ""
        yield f"The fit of `{structure}` warns that its score says little more than the norm of the features."
    if result["skipped"]:
        yield ""
        yield "Left out: " + " ".join(
            f"{', '.join(f'`{name}`' for name, given in result['skipped'].items() if given == reason)} ({reason})"
            for reason in dict.fromkeys(result["skipped"].values())
        )


def _columns(result: Result) -> dict[str, dict[str, tuple[str, float | None, bool]]]:
    """Column -> row -> cell, the figure that the best one is found by, and whether larger is better."""
    out: dict[str, dict[str, tuple[str, float | None, bool]]] = {}
    for name, row in result["rows"].items():

        def add(column: str, value: float | None, shown: str = "", larger: bool = True, name: str = name) -> None:
            text = shown or ("" if value is None else f"{value:.3f}")
            out.setdefault(column, {})[name] = (text, value, larger)

        add("R-AUROC", row["r_auroc"])
        add("AUSC", row["ausc"])
        for unknown, figures in row["unknown"].items():
            add(f"unknown: {unknown}", figures["auroc"])
        for kind, figures in row.get("harm", {}).items():
            levels = [level for level in ("3", max(figures["auroc"], key=int)) if level in figures["auroc"]]
            aurocs = ", ".join(f"{figures['auroc'][level]:.3f}" for level in dict.fromkeys(levels))
            add(f"harm: {kind}", figures["spearman"], f"{figures['spearman']:.3f} ({aurocs})")
        for combined, figures in row.get("pairs", {}).items():
            share = f"{REJECTED[0]:.0%}"
            error = figures["error_at"][0]
            add(f"pairs, {combined}: error, {share} rejected", error, f"{error:.4f}", larger=False)
    return out


def _marked(
    shown: str,
    value: float,
    name: str,
    figures: dict[str, tuple[str, float | None, bool]],
    free: set[str],
    larger: bool,
) -> str:
    sign = 1 if larger else -1
    top = max((sign * key for row, (_, key, _) in figures.items() if row in free and key is not None), default=None)
    if top is None or sign * value < top:
        return shown
    if name in free:
        return f"**{shown}**"
    return f"*{shown}*" if sign * value > top else shown
