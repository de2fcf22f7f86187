"""The tables, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.experiments.markdown import line, machines
from benchmarks.ndigit.document import ITERATIONS, SCORES, TAUS
from benchmarks.ndigit.judge import PARTS
from benchmarks.ndigit.rows import LAM, ROWS

__all__ = ["markdown"]

_TITLES = {
    "seen_clean": "seen, clean",
    "seen_corrupt": "seen, corrupt",
    "novel_clean": "novel, clean",
    "novel_corrupt": "novel, corrupt",
}
_SCORES = {
    "uncertainty": "self-mismatch",
    "nearest": "distance to the nearest neighbour",
}
_LAM_SCORES = {
    "uncertainty": "uncertainty",
    "novelty": "novelty",
    "lam_mismatch": "self-mismatch of sampled networks",
}
_DASH = "–"
_Cell = dict[str, Any]


def markdown(results: dict[str, Any]) -> str:
    """Write the tables.

    Args:
        results: From :func:`benchmarks.ndigit.run.run`.

    Returns:
        Tables 1 and 2 with the document's figures below each row, and detection of corrupt images and novel classes.
    """
    config, cells = results["config"], results["cells"]
    rows = {row.key: [cell for cell in cells if cell["row"] == row.key] for row in ROWS}
    rows = {key: found for key, found in rows.items() if found}
    n, dim = config["n"], config["dim"]
    parts = [f"# N-digit MNIST, N = {n}, D = {dim}\n", _setting(config)]
    parts += ["## Table 1: verification and identification\n", _table1(rows, SCORES.get((n, dim), {}))]
    parts += ["## Table 2: Kendall's tau between uncertainty and performance\n", _table2(rows, TAUS.get((n, dim), {}))]
    parts += ["## Detection (AUROC against clean images of seen classes)\n", _detection(rows)]
    parts += ["## Notes\n", _notes(config, cells)]
    return "\n".join(parts)


def _setting(config: dict[str, Any]) -> str:
    judged = "validation images, of training digits that training leaves out" if config["validate"] else "test images"
    layers = {"document": "one fully connected layer", "hidden": "two fully connected layers (the document: one)"}
    return (
        f"{config['train_size']:,} training images; {config['test_size']:,} {judged} in each part, "
        f"{config['pairs']:,} pairs. {config['iterations']:,} iterations (the document: {ITERATIONS:,}) in batches of "
        f"{config['batch_size']}, Adam, learning rate {config['lr']:g} falling to 2 % of it, encoder of two "
        f"convolutions and {layers[config['network']]} in {config['precision']}; weight "
        f"of the divergences {config['kl_weight']:g}.\n"
    )


def _table1(rows: dict[str, list[_Cell]], theirs: dict[str, dict[str, tuple[float, float]]]) -> str:
    heads = [*(f"{what}, {_TITLES[part]}" for what in ("AP", "5-NN") for part in PARTS)]
    lines = [line(["", *heads, "5-NN, seen, corrupt among clean", "runs"]), line(["---", *["---:"] * 10])]
    for key, cells in rows.items():
        by_match = "knn_by_match" in cells[0]["figures"]["seen_clean"]
        clean = _mean(cells, lambda c: c["figures"]["seen_corrupt"]["knn_clean_gallery"])
        runs = str(len(cells))
        means = [*_parts(cells, "ap_of_means"), *_parts(cells, "knn"), clean]
        if by_match:
            match = [*_parts(cells, "ap"), *_parts(cells, "knn_by_match"), ""]
            lines.append(line([f"{_title(key)}, by match probability", *match, runs]))
        else:
            lines.append(line([_title(key), *_parts(cells, "ap"), *means[4:], runs]))
        if key in theirs:
            shown = [f"*{value:.3f}*" for what in ("ap", "knn") for value in theirs[key][what]]
            lines.append(line(["*document*", *shown[:2], "", "", *shown[2:], "", "", "", ""]))
        if by_match:
            lines.append(line([f"{_title(key)}, by distance of means", *means, runs]))
    return "\n".join(lines) + "\n"


def _parts(cells: list[_Cell], figure: str) -> list[str]:
    """A figure of the four parts."""
    return [_mean(cells, lambda c, part=part: c["figures"][part].get(figure)) for part in PARTS]


def _table2(rows: dict[str, list[_Cell]], theirs: dict[str, dict[str, tuple[float, float]]]) -> str:
    lines = [line(["", "score", *(f"{what}, {_TITLES[part]}" for what in ("AP", "5-NN") for part in PARTS)])]
    lines.append(line(["---", "---", *["---:"] * 8]))
    for key, cells in rows.items():
        for score, title in _scores(key, cells).items():
            taus = [
                _mean(cells, lambda c, part=part, what=what, score=score: c["figures"][part][what].get(score), 2)
                for what in ("tau_ap", "tau_knn")
                for part in PARTS
            ]
            lines.append(line([_title(key), title, *taus]))
            if score == "uncertainty" and key in theirs:
                shown = [f"*{value:.2f}*" for what in ("ap", "knn") for value in theirs[key][what]]
                lines.append(line(["*document*", "", *shown[:2], "", "", *shown[2:], "", ""]))
    return "\n".join(lines) + "\n"


def _detection(rows: dict[str, list[_Cell]]) -> str:
    lines = [line(["", "score", *(_TITLES[part] for part in PARTS[1:])]), line(["---", "---", *["---:"] * 3])]
    for key, cells in rows.items():
        for score, title in _scores(key, cells).items():
            found = [
                _mean(cells, lambda c, part=part, score=score: c["figures"]["detection"][score][part])
                for part in PARTS[1:]
            ]
            lines.append(line([_title(key), title, *found]))
    return "\n".join(lines) + "\n"


def _notes(config: dict[str, Any], cells: list[_Cell]) -> str:
    notes = [
        "AP: of pairs of a part, half of which match, by match probability (K = 8 samples; LAM: 100 sampled networks, "
        "each the same for both images; points: minus the distance, which ranks alike).",
        "5-NN: each image among the others of its part; the majority of the five likeliest matches, K = 8 samples of "
        "each image (seen classes only), or of the five nearest by Euclidean distance of the means. The document does "
        "not say which, nor among which images. Corrupt among clean: the means of all clean images but its own twin.",
        "Tau: of 20 bins of equal size, the sign turned so that positive is good; pairs by their mean uncertainty. "
        "5-NN by means. The document's column has neither novel classes nor LAM.",
        f"Images of seen classes: {config['test_size']:,}; a corrupt part has a black square on every digit "
        "(document, appendix A).",
    ]
    seconds = [f"{cell['row']} {cell['fit_seconds']:.0f}" for cell in cells if cell["fit_seconds"] is not None]
    notes.append(f"Seconds of training: {', '.join(seconds)}.")
    learned = [
        f"{c['row']} a = {c['figures']['match']['a']:.2f}, b = {c['figures']['match']['b']:.2f}"
        for c in cells
        if "match" in c["figures"]
    ]
    if learned:
        notes.append(f"Learned numbers of the match probability: {'; '.join(learned)}.")
    notes += machines(cells)
    return "\n".join(f"- {note}" for note in notes) + "\n"


def _scores(key: str, cells: list[_Cell]) -> dict[str, str]:
    there = cells[0]["figures"]["detection"]
    titles = _LAM_SCORES if key == LAM else _SCORES
    return {name: title for name, title in titles.items() if name in there}


def _title(key: str) -> str:
    return next(row.title for row in ROWS if row.key == key)


def _mean(cells: list[_Cell], read: Callable[[_Cell], float | None], digits: int = 3) -> str:
    """Mean ± standard deviation over seeds, or a dash."""
    values = [value for value in map(read, cells) if value is not None]
    if not values:
        return _DASH
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"
