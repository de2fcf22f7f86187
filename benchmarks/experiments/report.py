"""All finished cells of a run folder as ``results.json`` and ``results.md``, beside the paper's figures."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.experiments import plan
from benchmarks.experiments.data import DATASETS, RetrievalData
from benchmarks.machine import table, write_atomically

FORMAT = 6
"""Of run folders."""
_POSTERIOR = "laplace_posthoc"
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
    plan.UNCERTAINTY: "uncertainty alone",
    plan.NOVELTY: "novelty alone",
    "inverse_kappa": "1/κ",
    "inverse_kappa_sampled": "1/κ of samples",
    "harmonic": "harmonic mean of variances (PFE's own)",
    "variance": "variance",
    "norm": "minus norm of the mean",
}
_STEPS = (
    ("training", plan.BASE, "fit"),
    ("curvature fit, prior and calibration", _POSTERIOR, "fit"),
    ("deterministic forward pass, all test images", plan.BASE, "predict"),
    ("prediction with uncertainty, novelty and p-value, all test images", _POSTERIOR, "predict"),
    ("prediction / forward pass (ratio)", _POSTERIOR, "predict_over_forward"),
    ("prediction with sampled networks, all test images", _POSTERIOR, "predict_inverse_kappa_sampled"),
    ("votes of the sampled networks, for the ECE", _POSTERIOR, "votes"),
)
Results = dict[str, Any]


def write_report(out: Path, config: Results, data: RetrievalData) -> str:
    """Write ``results.json`` and ``results.md`` of all cells in the run folder, those of earlier starts too.

    Args:
        out: Run folder.
        config: Options of the run.
        data: What it ran on.

    Returns:
        The Markdown.
    """
    everything = [json.loads(path.read_text(encoding="utf-8")) for path in out.glob("seed*/*.json")]
    everything.sort(key=lambda cell: (cell["seed"], cell["row"]))
    cells: list[Results] = []
    for one in everything:
        # Ensembles that share an encoder with one before would be counted as independent runs.
        before = {seed for other in cells if other["row"] == one["row"] for seed in other["members"]}
        if "failed" not in one and not before & set(one["members"]):
            cells.append(one)
    # A prediction is held against the plain forward passes of the same seed.
    plain = {one["seed"]: one["seconds"]["predict"] for one in cells if one["row"] == plan.BASE}
    for one in cells:
        if one["seed"] in plain:
            one["seconds"]["predict_over_forward"] = one["seconds"]["predict"] / plain[one["seed"]]
        if one["row"] in ("knn_embedding", "knn_features"):
            # What they fit is the embedding of the training images that they search.
            one["seconds"]["search"] = one["seconds"]["fit"] + one["seconds"]["predict"]
    rows: dict[str, list[Results]] = {}
    for one in cells:
        rows.setdefault(one["row"], []).append(one)
    sizes = {part: None if (split := getattr(data, part)) is None else len(split) for part in ("train", "test", "ood")}
    sizes["calibration"] = None if data.calibration is None else len(data.calibration)
    results = {
        "format": FORMAT,
        "config": config,
        "data": {"title": data.title, "ood_title": data.ood_title, **sizes},
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": {key: summarized(found) for key, found in rows.items()},
        "cells": cells,
        "failed": [one for one in everything if "failed" in one],
    }
    text = (demo_page if config["table"] == plan.DEMO else table_page)(results)
    write_atomically(out / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
    write_atomically(out / "results.md", text)
    return text


def summarized(cells: list[Results]) -> Results:
    """One row of a table from its cells: the seeds, and mean and sample deviation of every figure, score and time."""

    def over(parts: list[Results]) -> Results:
        summary = {}
        for key in dict.fromkeys(key for part in parts for key in part):
            # What is undefined does not count.
            values = [part[key] for part in parts if part.get(key) is not None]
            mean = statistics.fmean(values) if values else None
            summary[key] = {
                "mean": mean,
                "std": statistics.stdev(values) if len(values) > 1 else None,
                "n": len(values),
            }
        return summary

    names = dict.fromkeys(name for one in cells for name in one["variants"])
    return {
        "seeds": [one["seed"] for one in cells],
        "figures": over([one["figures"] for one in cells]),
        "variants": {name: over([one["variants"].get(name, {}) for one in cells]) for name in names},
        "seconds": over([one["seconds"] for one in cells]),
    }


def shown(summary: Results | None, digits: int = 3) -> str:
    """Mean ± standard deviation, or a dash."""
    if summary is None or summary["mean"] is None:
        return "–"
    spread = "" if summary["std"] is None else f" ± {summary['std']:.{digits}f}"
    return f"{summary['mean']:.{digits}f}{spread}"


def table_page(results: Results) -> str:
    """The table, the paper's figures below each row, scores and definitions of the released code, seconds, notes."""
    config, data, found = results["config"], results["data"], results["rows"]
    rows = [row for row in plan.known_rows(config["table"]) if row.key in found]
    paper = plan.paper_rows(config["table"], config["data"])
    columns = plan.COLUMNS[config["table"]]
    columns = columns | {k: v for k, v in _EXTRA.items() if any(k in found[row.key]["figures"] for row in rows)}
    lines = []
    for row in rows:
        figures = found[row.key]["figures"]
        lines.append([row.title, *(shown(figures.get(key)) for key in columns), len(found[row.key]["seeds"])])
        if row.key in paper:
            lines.append(_paper_line("*paper*", paper[row.key], columns))
    lines += [
        _paper_line(f"*{row.title}; paper*", paper[row.key], columns)
        for row in plan.known_rows(config["table"])
        if row.key in paper and row.key not in found
    ]
    variants = {
        key: title
        for key, title in _VARIANTS.items()
        if any(key in figures for row in rows for figures in found[row.key]["variants"].values())
    }
    scores = []
    for row in rows:
        released = shown(found[row.key]["figures"].get("ece_released"))
        two = plan.NOVELTY in found[row.key]["variants"]
        own = "the method's own: novelty for AUROC and AUPRC, uncertainty else" if two else "the method's own"
        for name, figures in found[row.key]["variants"].items():
            score = own if name == plan.OWN else _SCORES.get(name, name)
            scores.append([row.title, score, *(shown(figures.get(key)) for key in variants), released])
            released = ""  # The votes are the method's, whichever score it is asked for.
    seconds = [[row.title, *(shown(found[row.key]["seconds"].get(key), 1) for key in _SECONDS)] for row in rows]
    classes = "" if config["per_class"] is None else f" of {config['per_class']} images a class"
    passes = "" if config["dropout_passes"] is None else f", {config['dropout_passes']} at most for MC dropout"
    sizes = (
        f"{data['train']:,} training, {data['test']:,} test images, {data['ood'] or 0:,} out of distribution. Network "
        f"{config['network']}, {config['dim']} dimensions; "
    )
    if config["epochs"]:
        sizes += (
            f"{config['epochs']} epochs in batches of {config['batch_size']}{classes}, learning rate {config['lr']:g}, "
            f"margin {config['margin']:g}; {config['n_samples']} samples{passes}; protocol {config['protocol']}, "
            f"memory factor of online LAM {config['memory_factor']:g}; training in {config['precision']}."
        )
    else:
        sizes += f"pretrained, nothing is trained here; margin {config['margin']:g}; {config['n_samples']} samples."
    return "\n\n".join(
        [
            f"# Table {config['table']}: {data['title']}; out of distribution: {data['ood_title']}",
            sizes,
            table(["", *columns.values(), "runs"], lines),
            "## Scores and definitions",
            table(["method", "score", *variants.values(), "ECE, released code"], scores),
            "## Seconds",
            table(["", *_SECONDS.values()], seconds),
            "## Notes",
            "\n".join(f"- {note}" for note in _notes(results, bool(paper))) + "\n",
        ]
    )


def _paper_line(title: str, figures: dict[str, tuple[float, float | None]], columns: Iterable[str]) -> list[str]:
    cells = []
    for key in columns:
        mean, std = figures.get(key, (None, None))
        cells.append("" if mean is None else f"*{mean:.2f}*" if std is None else f"*{mean:.2f} ± {std:.2f}*")
    return [title, *cells, ""]


def _notes(results: Results, paper: bool) -> list[str]:
    config, rows = results["config"], results["rows"]
    notes = [
        "Mean ± sample standard deviation over seeds; definitions in docs/report.md. R-AUROC: how well the "
        "uncertainty tells a wrong nearest neighbour, in distribution.",
        "Seconds: of fit, of the method alone, without the deterministic encoder that it builds on (an ensemble: all "
        "members); of prediction, for mean and uncertainty of all test images, in and out of distribution.",
        "Released code: AUPRC by the trapezoidal rule; AUSC with the neighbour's uncertainty added, over 99 "
        "percentiles; ECE over bins [low, high), which leave out full agreement.",
    ]
    if not config["epochs"]:
        notes.append(
            "Features stand for images: seconds are without the encoder up to its last layer, and the plain forward "
            "pass is that layer alone."
        )
    if any(plan.NOVELTY in row["variants"] for row in rows.values()):
        notes.append(
            "LAM has two scores: AUROC and AUPRC are of its novelty, AUSC and R-AUROC of its uncertainty. All other "
            "methods have one score for both questions."
        )
    if any("map_at_1_released" in row["figures"] for row in rows.values()):
        notes.append(
            "Some queries have no positive. Our figures leave them out; in the released code, and so in the paper, "
            "they are wrong at 1 and right at 5 and 10. The paper's figures compare with those columns only."
        )
    if any(key.startswith("deep_ensemble") for key in rows):
        notes.append(
            f"Deep ensembles ({plan.MEMBERS} votes for the ECE, whatever the others have): so many seeds of the run at "
            "a time form one from their deterministic encoders; fewer are filled up with encoders of further seeds. "
            "Aligned: the members are rotated onto the first. The paper has one ensemble, not aligned, and so no "
            "deviation."
        )
    if paper:
        data = DATASETS[plan.ABLATION_DATA if config["table"] == "1" else config["data"]].title
        notes.append(f"*Paper*: Warburg et al. (2023), on {data}, mean ± standard deviation of five runs.")
        usual = plan.defaults_of(config["table"], config["data"])
        if any(config[name] != usual[name] for name in ("dim", "epochs")) or config["train_size"] is not None:
            wanted = f"{usual['network']}, dimension {usual['dim']}, {usual['epochs']} epochs, all training images"
            notes.append(f"Not the paper's setting ({wanted}): compare with care.")
    if config["protocol"] == "released":
        notes.append("Protocol of the released code: AUPRC, AUSC and ECE of the first table are by its definitions.")
    notes += [f"**Failed**: {one['row']}, seed {one['seed']}: {one['failed']}" for one in results["failed"]]
    return notes + machines(results["cells"])


def machines(cells: list[Results]) -> list[str]:
    """A sentence on each machine that cells ran on."""
    kept = (
        ", ".join(f"{k} {v}" for k, v in sorted(one["machine"].items()) if k not in ("load", "date") and v is not None)
        for one in cells
    )
    return [f"Machine: {one}." for one in sorted(set(kept))]


def demo_page(results: Results) -> str:
    """The page of the demonstration: one table a seed, and from two seeds up one of means; then what each step took."""
    config, rows = results["config"], results["rows"]
    head = f"latent dimension {config['dim']}, {config['epochs']} epochs; out of distribution: "
    parts = [f"# contrastive_curvature demo: {config['data']}, {head}{results['data']['ood_title']}"]
    seeds = sorted({one["seed"] for one in results["cells"]})
    paper = plan.paper_rows("2", config["data"])
    for seed in seeds:
        alone = {one["row"]: summarized([one]) for one in results["cells"] if one["seed"] == seed}
        parts += [f"Seed {seed}", _demo_table(alone, paper if len(seeds) == 1 else {})]
    if len(seeds) > 1:
        parts += [f"Mean ± standard deviation over {len(seeds)} seeds", _demo_table(rows, paper)]
    parts.append(
        "Laplace has two scores: AUROC and AUPRC are of its `novelty`, AUSC and R-AUROC of its `uncertainty`; the "
        "other rows have one for both questions. mAP: leave-one-out among the test images. AUROC, AUPRC: out of "
        "distribution is positive. AUSC: of mAP@1. R-AUROC: a wrong nearest neighbour is positive. ECE: "
        f"of the votes of {config['n_samples']} sampled networks. Seconds: for all test images, in and out of "
        "distribution, forward passes included; the 10-NN rows include embedding the training images that they search, "
        "in feature space at most 10,000 of them."
    )
    if _POSTERIOR in rows:
        parts.append(flagged(rows[_POSTERIOR]["figures"], results["data"]))
    steps = [
        [title, shown(rows[key]["seconds"][name], 2)]
        for title, key, name in _STEPS
        if key in rows and name in rows[key]["seconds"]
    ]
    parts.append(table(["step", "seconds"], steps))
    parts += [f"**Failed**: {one['row']}, seed {one['seed']}: {one['failed']}" for one in results["failed"]]
    return "\n\n".join([*filter(None, parts), *machines(results["cells"])]) + "\n"


def _demo_table(rows: Results, paper: Results) -> str:
    columns, lines = plan.COLUMNS[plan.DEMO], []
    for row in plan.known_rows(plan.DEMO):
        found = rows.get(row.key, {"variants": {}})
        for name, title in plan.score_titles(plan.DEMO, row).items():
            if name in found["variants"]:
                figures = found["figures"] | found["variants"][name]
                seconds = found["seconds"].get(f"predict_{name}", found["seconds"]["predict"])
                seconds = shown(found["seconds"].get("search", seconds), 1)
                lines.append([title, *(shown(figures.get(key)) for key in columns), seconds])
    for key, title in (
        {"laplace_posthoc_diag": "LAM post-hoc", "laplace_online_diag": "LAM online"}.items() if paper else ()
    ):
        cells = [f"{paper[key][name][0]:.2f}" if name in plan.QUALITY else "–" for name in columns]
        lines.append([f"Warburg et al. 2023: {title}", *cells, "–"])
    return table(["score", *columns.values(), "seconds"], lines)


def flagged(figures: Results, data: Results) -> str:
    """The table of flagged images of the demonstration's page; empty where there are no p-values."""
    alphas = [alpha for alpha in plan.ALPHAS if f"flagged_known_{alpha}" in figures]
    if not alphas:
        return ""
    lines = []
    kinds = {"known": (f"test images, {data['title']}", "test")}
    kinds["unknown"] = (f"out of distribution, {data['ood_title']}", "ood")
    for kind, (title, part) in kinds.items():
        shares = [figures[f"flagged_{kind}_{alpha}"]["mean"] for alpha in alphas]
        lines.append([title, *(f"{p:.3f} \u00b1 {math.sqrt(p * (1 - p) / data[part]):.3f}" for p in shares)])
    held = data["calibration"]
    scatter = ", ".join(f"{math.sqrt(alpha * (1 - alpha) / held):.3f}" for alpha in alphas)
    head = ["flagged as unknown at", *(f"\u03b1 = {alpha:g}" for alpha in alphas)]
    return (
        f"Threshold: `la.calibrate` with {held:,} training images that were held out, then `~la(x).is_known(alpha)`\n\n"
        f"{table(head, lines)}\n\n\u00b1: binomial standard error. Of test images at most a share \u03b1 is to be "
        f"expected, on average over calibration sets; a set of {held:,} scatters around it by {scatter}."
    )
