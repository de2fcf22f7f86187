"""The page of the demonstration: every score of one encoder, and what each step took."""

from __future__ import annotations

from typing import Any

from benchmarks.experiments.markdown import cell, line, machines
from benchmarks.experiments.paper import paper_table
from benchmarks.experiments.plan import BASE, DEMO, QUALITY, known_rows, score_titles
from benchmarks.experiments.summary import summarize_cells

__all__ = ["demo_markdown"]

_POSTERIOR = "laplace_posthoc"
_STEPS = (
    ("training", BASE, "fit"),
    ("curvature fit and prior", _POSTERIOR, "fit"),
    ("deterministic forward pass, all test images", BASE, "predict"),
    ("prediction with uncertainty, closed form, all test images", _POSTERIOR, "predict"),
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
    parts += [_notes(config), _seconds(rows)]
    parts += [f"**Failed**: {found['row']}, seed {found['seed']}: {found['failed']}\n" for found in results["failed"]]
    return "\n".join([*parts, *(f"{machine}\n" for machine in machines(results["cells"]))])


def _table(rows: dict[str, Any], paper: str) -> str:
    lines = [line(["uncertainty", *QUALITY.values(), "seconds"]), "|---|" + "---:|" * (len(QUALITY) + 1)]
    for row in known_rows(DEMO):
        found = rows.get(row.key, {"variants": {}})
        for name, title in score_titles(DEMO, row).items():
            if name in found["variants"]:
                figures = found["figures"] | found["variants"][name]
                cells = [cell(figures.get(key)) for key in QUALITY]
                seconds = found["seconds"].get(f"predict_{name}", found["seconds"]["predict"])
                lines.append(line([title, *cells, cell(found["seconds"].get("search", seconds), 1)]))
    theirs = paper_table(2, paper)
    for key, title in _PAPER.items() if theirs is not None else ():
        cells = [f"{theirs.rows[key][figure][0]:.2f}" for figure in QUALITY]
        lines.append(line([f"Warburg et al. 2023: {title}", *cells, "–"]))
    return "\n".join(lines) + "\n"


def _notes(config: dict[str, Any]) -> str:
    return (
        "mAP: leave-one-out among the test images. AUROC, AUPRC: out of distribution is positive. AUSC: of mAP@1. ECE: "
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
