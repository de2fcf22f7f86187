"""The page of the demonstration: every score of one encoder, and what each step took."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.experiments.markdown import cell, line, machines, summarize_cells
from benchmarks.experiments.paper import paper_table
from benchmarks.experiments.plan import ALPHAS, BASE, COLUMNS, DEMO, QUALITY, known_rows, score_titles

_POSTERIOR = "laplace_posthoc"
_STEPS = (
    ("training", BASE, "fit"),
    ("curvature fit, prior and calibration", _POSTERIOR, "fit"),
    ("deterministic forward pass, all test images", BASE, "predict"),
    ("prediction with uncertainty, novelty and p-value, all test images", _POSTERIOR, "predict"),
    ("prediction / forward pass (ratio)", _POSTERIOR, "predict_over_forward"),
    ("prediction with sampled networks, all test images", _POSTERIOR, "predict_inverse_kappa_sampled"),
    ("votes of the sampled networks, for the ECE", _POSTERIOR, "votes"),
)
_PAPER = {_POSTERIOR: "LAM post-hoc", "laplace_online": "LAM online"}


def demo_markdown(results: dict[str, Any]) -> str:
    """Write the page.

    Args:
        results: From :func:`benchmarks.experiments.report.collect`.

    Returns:
        Markdown: one table a seed, and from two seeds up one of mean ± standard deviation; then the seconds.
    """
    config, rows = results["config"], results["rows"]
    outside = results["data"]["ood_title"] or "nothing"
    head = f"latent dimension {config['dim']}, {config['epochs']} epochs; out of distribution: {outside}"
    parts = [f"# contrastive_curvature demo: {config['data']}, {head}\n"]
    seeds = sorted({found["seed"] for found in results["cells"]})
    # The paper's figures are of its own images out of distribution.
    paper = config["data"] if config["ood"] is None else ""
    for seed in seeds:
        mine = [found for found in results["cells"] if found["seed"] == seed]
        alone = {found["row"]: summarize_cells([found]) for found in mine}
        parts += [f"Seed {seed}\n", _table(alone, paper if len(seeds) == 1 else "")]
    if len(seeds) > 1:
        parts += [f"Mean ± standard deviation over {len(seeds)} seeds\n", _table(rows, paper)]
    parts.append(_notes(config))
    flagged = flagged_markdown(rows.get(_POSTERIOR, {"figures": {}})["figures"], results["data"])
    parts += [flagged] if flagged else []
    parts.append(_seconds(rows))
    parts += [f"**Failed**: {found['row']}, seed {found['seed']}: {found['failed']}\n" for found in results["failed"]]
    return "\n".join([*parts, *(f"{machine}\n" for machine in machines(results["cells"]))])


def _table(rows: dict[str, Any], paper: str) -> str:
    columns = COLUMNS[DEMO]
    lines = [line(["score", *columns.values(), "seconds"]), "|---|" + "---:|" * (len(columns) + 1)]
    for row in known_rows(DEMO):
        found = rows.get(row.key, {"variants": {}})
        for name, title in score_titles(DEMO, row).items():
            if name in found["variants"]:
                figures = found["figures"] | found["variants"][name]
                cells = [cell(figures.get(key)) for key in columns]
                seconds = found["seconds"].get(f"predict_{name}", found["seconds"]["predict"])
                lines.append(line([title, *cells, cell(found["seconds"].get("search", seconds), 1)]))
    theirs = paper_table(2, paper)
    for key, title in _PAPER.items() if theirs is not None else ():
        cells = [f"{theirs.rows[key][name][0]:.2f}" if name in QUALITY else "–" for name in columns]
        lines.append(line([f"Warburg et al. 2023: {title}", *cells, "–"]))
    return "\n".join(lines) + "\n"


def _notes(config: dict[str, Any]) -> str:
    return (
        "Laplace has two scores: AUROC and AUPRC are of its `novelty`, AUSC and R-AUROC of its `uncertainty`; the "
        "other rows have one for both questions. mAP: leave-one-out among the test images. AUROC, AUPRC: out of "
        "distribution is positive. AUSC: of mAP@1. R-AUROC: a wrong nearest neighbour is positive. ECE: "
        f"of the votes of {config['ece_samples']} sampled networks. Seconds: for all test images, in and out of "
        "distribution, forward passes included; the 10-NN rows include embedding the training images that they search, "
        f"in feature space at most {config['baseline_features']:,} of them.\n"
    )


def _seconds(rows: dict[str, Any]) -> str:
    lines = [line(["step", "seconds"]), "|---|---:|"]
    for title, key, name in _STEPS:
        if key in rows and name in rows[key]["seconds"]:
            lines.append(line([title, cell(rows[key]["seconds"][name], 2)]))
    return "\n".join(lines) + "\n"


def flagged_markdown(figures: dict[str, Any], data: dict[str, Any]) -> str:
    """The table of flagged images of the demonstration's page.

    Args:
        figures: Summaries over seeds, by name.
        data: Sizes of the data sets.

    Returns:
        Markdown; empty where there are no p-values.
    """
    shown = [alpha for alpha in ALPHAS if f"flagged_known_{alpha}" in figures]
    if not shown:
        return ""
    lines = [line(["flagged as unknown at", *(f"\u03b1 = {alpha:g}" for alpha in shown)])]
    lines.append("|---|" + "---:|" * len(shown))
    kinds = {"known": (f"test images, {data['title']}", data["test"])}
    if data["ood"] is not None:
        kinds["unknown"] = (f"out of distribution, {data['ood_title']}", data["ood"])
    for kind, (title, count) in kinds.items():
        cells = []
        for alpha in shown:
            share = figures[f"flagged_{kind}_{alpha}"]["mean"]
            cells.append(f"{share:.3f} \u00b1 {math.sqrt(share * (1 - share) / count):.3f}")
        lines.append(line([title, *cells]))
    held = data["calibration"]
    scatter = ", ".join(f"{math.sqrt(alpha * (1 - alpha) / held):.3f}" for alpha in shown)
    return (
        f"Threshold: `la.calibrate` with {held:,} training images that were held out, then `~la(x).is_known(alpha)`\n\n"
        + "\n".join(lines)
        + "\n\n\u00b1: binomial standard error. Of test images at most a share \u03b1 is to be expected, on average "
        f"over calibration sets; a set of {held:,} scatters around it by {scatter}.\n"
    )
