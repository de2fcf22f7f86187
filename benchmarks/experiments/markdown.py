"""The tables of ``results.md``, and the means over seeds that stand in them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.experiments.data import DATASETS
from benchmarks.experiments.defaults import DEFAULTS
from benchmarks.experiments.paper import PaperTable, paper_table
from benchmarks.experiments.plan import COLUMNS, MEMBERS, NOVELTY, OWN, UNCERTAINTY, Row, known_rows

_EXTRA = {
    "ece": "ECE",
    "r_auroc": "R-AUROC",
    "brier": "Brier",
    "map_at_1_released": "mAP@1, released code",
    "map_at_5_released": "mAP@5, released code",
    "map_at_10_released": "mAP@10, released code",
}
_VARIANTS = {
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "ausc": "AUSC",
    "r_auroc": "R-AUROC",
    "auprc_released": "AUPRC, released code",
    "ausc_released": "AUSC, released code",
}
_SECONDS = {"fit": "fit [s]", "predict": "predict [s]", "predict_over_forward": "predict / plain forward pass"}
_SCORES = {
    "sum_std": "sum of standard deviations (released code)",
    UNCERTAINTY: "uncertainty alone",
    NOVELTY: "novelty alone",
    "inverse_kappa": "1/κ",
    "inverse_kappa_sampled": "1/κ of samples",
    "harmonic": "harmonic mean of variances (PFE's own)",
    "variance": "variance",
    "norm": "minus norm of the mean",
}
_CURVATURE = ("distance", "pd_fix", "negative_weight")
_DASH = "–"


def markdown(results: dict[str, Any]) -> str:
    """Write the tables.

    Args:
        results: From :func:`benchmarks.experiments.report.collect`.

    Returns:
        Markdown: the paper's table with the paper's figures below each row, scores and definitions of the released
        code, seconds, and notes.
    """
    config, data = results["config"], results["data"]
    table = config["table"]
    rows = [row for row in known_rows(table) if row.key in results["rows"]]
    paper = paper_table(table, config["data"])
    outside = "" if data["ood_title"] is None else f"; out of distribution: {data['ood_title']}"
    parts = [f"# Table {table}: {data['title']}{outside}\n", _sizes(config, data)]
    parts.append(_main(rows, results["rows"], table, paper))
    scored = [row for row in rows if results["rows"][row.key]["variants"]]
    if scored:
        parts += ["## Scores and definitions\n", _variants(scored, results["rows"])]
    parts += ["## Seconds\n", _seconds(rows, results["rows"]), "## Notes\n", _notes(rows, results, paper)]
    return "\n".join(parts)


def _main(rows: list[Row], found: dict[str, Any], table: int, paper: PaperTable | None) -> str:
    shown = COLUMNS[table] | {
        key: title for key, title in _EXTRA.items() if any(key in found[row.key]["figures"] for row in rows)
    }
    lines = [line(["", *shown.values(), "runs"]), line(["---", *["---:"] * (len(shown) + 1)])]
    theirs = {} if paper is None else dict(paper.rows)
    for row in rows:
        figures = found[row.key]["figures"]
        cells = [cell(figures.get(key)) for key in shown]
        lines.append(line([row.title, *cells, str(len(found[row.key]["seeds"]))]))
        if paper is not None and row.key in theirs:
            lines.append(_paper_line(f"*paper, {paper.data}*", theirs.pop(row.key), list(shown)))
    if paper is not None and "hib" in theirs:
        lines.append(_paper_line(f"*HIB; paper, {paper.data}*", theirs["hib"], list(shown)))
    return "\n".join(lines) + "\n"


def _paper_line(title: str, figures: dict[str, tuple[float, float | None]], keys: list[str]) -> str:
    cells = []
    for key in keys:
        mean, std = figures.get(key, (None, None))
        cells.append("" if mean is None else f"*{mean:.2f}*" if std is None else f"*{mean:.2f} ± {std:.2f}*")
    return line([title, *cells, ""])


def _variants(rows: list[Row], found: dict[str, Any]) -> str:
    shown = {
        key: title
        for key, title in _VARIANTS.items()
        if any(key in figures for row in rows for figures in found[row.key]["variants"].values())
    }
    votes = any("ece_released" in found[row.key]["figures"] for row in rows)
    heads = ["method", "score", *shown.values(), *(["ECE, released code"] if votes else [])]
    lines = [line(heads), line(["---", "---", *["---:"] * (len(heads) - 2)])]
    for row in rows:
        for number, (name, figures) in enumerate(found[row.key]["variants"].items()):
            cells = [cell(figures.get(key)) for key in shown]
            if votes:
                # The votes are the method's, whichever score it is asked for.
                cells.append(cell(found[row.key]["figures"].get("ece_released")) if number == 0 else "")
            two = NOVELTY in found[row.key]["variants"]
            own = "the method's own: novelty for AUROC and AUPRC, uncertainty else" if two else "the method's own"
            score = own if name == OWN else _SCORES.get(name, name)
            lines.append(line([row.title, score, *cells]))
    return "\n".join(lines) + "\n"


def _seconds(rows: list[Row], found: dict[str, Any]) -> str:
    lines = [line(["", *_SECONDS.values()]), line(["---", *["---:"] * len(_SECONDS)])]
    for row in rows:
        lines.append(line([row.title, *(cell(found[row.key]["seconds"].get(key), 1) for key in _SECONDS)]))
    return "\n".join(lines) + "\n"


def _sizes(config: dict[str, Any], data: dict[str, Any]) -> str:
    parts = [f"{data['train']:,} training, {data['test']:,} test images"]
    if data["gallery"] is not None:
        parts.append(f"{data['gallery']:,} in the gallery")
    if data["ood"] is not None:
        parts.append(f"{data['ood']:,} out of distribution")
    classes = "" if config["per_class"] is None else f" of {config['per_class']} images a class"
    return (
        f"{', '.join(parts)}. Network {config['network']}, {config['dim']} dimensions; {config['epochs']} epochs in "
        f"batches of {config['batch_size']}{classes}, learning rate {config['lr']:g}, margin "
        + ("none" if config["margin"] is None else f"{config['margin']:g}")
        + "".join(f", {name} {config[name]}" for name in _CURVATURE if config[name] is not None)
        + f"; {config['n_samples']} samples, {config['ece_samples']} for votes"
        + ("" if config["dropout_passes"] is None else f", {config['dropout_passes']} at most for MC dropout")
        + f"; memory factor of online LAM {config['memory_factor']:g}"
        # Not there in float32, see Config.identity.
        + (f"; training in {config['precision']}.\n" if "precision" in config else ".\n")
    )


def _notes(rows: list[Row], results: dict[str, Any], paper: PaperTable | None) -> str:
    config = results["config"]
    notes = [
        "Mean ± sample standard deviation over seeds; definitions in docs/report.md. R-AUROC: how well the "
        "uncertainty tells a wrong nearest neighbour, in distribution.",
        "Seconds: of fit, of the method alone, without the deterministic encoder that it builds on (an ensemble: all "
        "members); of prediction, for mean and uncertainty of all test images, in and out of distribution.",
        "Released code: AUPRC by the trapezoidal rule; AUSC with the neighbour's uncertainty added, over 99 "
        "percentiles; ECE over bins [low, high), which leave out full agreement.",
    ]
    if any(NOVELTY in results["rows"][row.key]["variants"] for row in rows):
        notes.append(
            "LAM has two scores: AUROC and AUPRC are of its novelty, AUSC and R-AUROC of its uncertainty. All other "
            "methods have one score for both questions."
        )
    if any("map_at_1_released" in results["rows"][row.key]["figures"] for row in rows):
        notes.append(
            "Some queries have no positive. Our figures leave them out; in the released code, and so in the paper, "
            "they are wrong at 1 and right at 5 and 10. The paper's figures compare with those columns only."
        )
    if any(row.is_ensemble for row in rows):
        notes.append(
            f"Deep ensembles ({MEMBERS} votes for the ECE, whatever the others have): {MEMBERS} seeds of the run at a "
            "time form one from their deterministic encoders; fewer "
            "are filled up with encoders of further seeds. Aligned: the members are rotated onto the first. The paper "
            "has one ensemble, not aligned, and so no deviation."
        )
    if any(row.method == "mc_dropout" for row in rows) and config["dropout_passes"] is not None:
        passes = min(config["dropout_passes"], config["ece_samples"])
        notes.append(f"MC dropout has {passes} votes for the ECE, each of one pass with masks drawn for every image.")
    if paper is not None:
        # The paper's table 1 has other data, and stands beside any.
        own = _own_setting(config) if config["table"] != 1 or config["data"] == "lfw" else ""
        if own:
            notes.append(f"Not the paper's setting, so compare with care: {own}.")
        deviation = "" if config["table"] == 4 else ", mean ± standard deviation of five runs"
        notes.append(f"*Paper*: Warburg et al. (2023), on {paper.data}{deviation}.")
        if "hib" in paper.rows and "hib" not in results["rows"]:
            notes.append("HIB is the paper's; its row (hib) was not run.")
    notes += [f"**Failed**: {one['row']}, seed {one['seed']}: {one['failed']}" for one in results["failed"]]
    notes += machines(results["cells"])
    return "\n".join(f"- {note}" for note in notes) + "\n"


def machines(cells: list[dict[str, Any]]) -> list[str]:
    """A sentence on each machine that cells ran on."""
    found = {
        tuple((name, str(value)) for name, value in sorted(one["machine"].items()) if name not in ("load", "date"))
        for one in cells
    }
    return ["Machine: " + ", ".join(f"{k} {v}" for k, v in machine if v != "None") + "." for machine in sorted(found)]


def _own_setting(config: dict[str, Any]) -> str:
    """In what a run differs from the data set's defaults, which are the paper's."""
    usual = DEFAULTS[config["data"]]
    differ = [
        f"{title} {config[name]:,} (there {getattr(usual, name):,})"
        for name, title in (("dim", "dimension"), ("epochs", "epochs"))
        if config[name] != getattr(usual, name)
    ]
    if config["ood"] is not None:
        differ.append(f"{config['ood']} out of distribution (there {DATASETS[config['data']].ood})")
    if config["train_size"] is not None:
        differ.append(f"{config['train_size']:,} of the training images (there all)")
    return ", ".join(differ)


def cell(summary: dict[str, Any] | None, digits: int = 3) -> str:
    """Mean ± standard deviation, or a dash."""
    if summary is None or summary["mean"] is None:
        return _DASH
    spread = "" if summary["std"] is None else f" ± {summary['std']:.{digits}f}"
    return f"{summary['mean']:.{digits}f}{spread}"


def line(cells: list[str]) -> str:
    """A row of a table."""
    return "| " + " | ".join(cells) + " |"


Summary = dict[str, float | int | None]
"""``mean``, ``std`` (of the sample, ``None`` for one value) and the number ``n`` of values."""


def summarize(values: Sequence[float | None]) -> Summary:
    """Mean and sample standard deviation over seeds.

    Args:
        values: One a seed; ``None`` where the figure is undefined, which does not count.

    Returns:
        The summary; its mean is ``None`` where nothing counts.
    """
    known = [value for value in values if value is not None]
    return {
        "mean": statistics.fmean(known) if known else None,
        "std": statistics.stdev(known) if len(known) > 1 else None,
        "n": len(known),
    }


def summarize_cells(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of a table from its cells: the seeds, and mean and deviation of every figure, score and time."""
    names = list(dict.fromkeys(name for cell in cells for name in cell["variants"]))
    return {
        "seeds": [cell["seed"] for cell in cells],
        "figures": _over([cell["figures"] for cell in cells]),
        "variants": {name: _over([cell["variants"].get(name, {}) for cell in cells]) for name in names},
        "seconds": _over([cell["seconds"] for cell in cells]),
    }


def _over(parts: list[dict[str, Any]]) -> dict[str, Summary]:
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: summarize([part.get(key) for part in parts]) for key in keys}
