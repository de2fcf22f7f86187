"""The default prior, temperature and score are right for several encoders, and what the alternatives cost.

Takes run folders of the demonstration (``python -m benchmarks.experiments --table demo --out FOLDER``), loads their
posteriors, and compares rules for the prior: AUROC and AUPRC of ``novelty``, AUSC of ``uncertainty``, and all three of
``1 / kappa``. After each rule the posterior is calibrated again, as in the run.

    python -m benchmarks.default_prior FOLDER [FOLDER ...] --data-root ../shared/data --out benchmarks/results
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.finished import Finished, read_run
from benchmarks.experiments.methods.sampled import PosteriorMethod, draw_embeddings, read_features
from benchmarks.machine import describe, write_atomically
from contrastive_curvature import EmbeddingDistribution, metrics
from contrastive_curvature.laplace import calibration
from contrastive_curvature.laplace.features import Features

COLUMNS = ("auroc", "auprc", "ausc")
_ROW = "laplace_posthoc"


def of_strength(strength: float) -> Callable[[Any], None]:
    """The default rule with another prior scale."""
    return lambda la: la.optimize_prior_precision(strength=strength)


def at_temperature_one(method: str) -> Callable[[Any], None]:
    """A rule that leaves the temperature alone."""

    def apply(la: Any) -> None:
        la.temperature = 1.0
        la.prior_precision = 1.0
        if method != "one":
            la.optimize_prior_precision(method=method)

    return apply


RULES: dict[str, Callable[[Any], None]] = {
    "a hundredth of the average information, T from the loss (default)": lambda la: la.optimize_prior_precision(),
    "a tenth of the average information": of_strength(0.1),
    "the average information": of_strength(1.0),
    "ten times the average information": of_strength(10.0),
    "unit information, T = 1": at_temperature_one("unit_information"),
    "prior precision 1, T = 1": at_temperature_one("one"),
    "marginal likelihood (scalar), T = 1": at_temperature_one("marglik"),
}


def main() -> None:
    """Compare the rules on every encoder, print the table, write JSON and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of the demonstration")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="where the images are")
    parser.add_argument("--n-samples", type=int, default=100, help="sampled networks for the ECE")
    parser.add_argument("--seeds", type=int, nargs="+", help="only these seeds of every run")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    given.out.mkdir(parents=True, exist_ok=True)
    for folder in given.runs:
        run = read_run(folder, given.data_root)
        for seed in [seed for seed in run.seeds(_ROW) if given.seeds is None or seed in given.seeds]:
            rows += compare(run, seed, given.n_samples)
            # After every encoder, so that an interrupted run leaves what it has.
            result = {"machine": describe(), "n_samples": given.n_samples, "rows": rows}
            write_atomically(given.out / "default_prior.json", json.dumps(result, indent=1) + "\n")
            write_atomically(given.out / "default_prior.md", markdown(rows))
    print(markdown(rows))


def compare(run: Finished, seed: int, n_samples: int) -> list[dict[str, Any]]:
    """Figures of every rule on one encoder."""
    method, data = run.load(_ROW, seed), run.data
    assert isinstance(method, PosteriorMethod)
    assert data.ood is not None
    la = method.posterior
    (z_in, phi_in), (z_out, phi_out) = (read_features(la, run.setting, split) for split in (data.test, data.ood))
    ranking = metrics.rank_by_labels(metrics.nearest_neighbors(z_in, k=10), data.test.targets)
    precision = metrics.average_precision_at_k(ranking, 1)
    rows = []
    for name, rule in RULES.items():
        rule(la)
        method.calibrate(data)
        row: dict[str, Any] = {"dataset": run.config["data"], "dim": run.config["dim"], "seed": seed, "rule": name}
        row |= {"training_images": len(data.train)}
        row |= {f"map_at_{k}": metrics.map_at_k(ranking, k) for k in (1, 5, 10)}
        row |= {"prior_precision": float(la.prior_precision), "temperature": float(la.temperature)}
        predicted = [predict(la, z, phi) for z, phi in ((z_in, phi_in), (z_out, phi_out))]
        inside, outside = predicted
        angles = (inside.tangential_variance, outside.tangential_variance)
        for score, found, ranks in (
            ("own", (inside.novelty, outside.novelty), inside.uncertainty),
            ("inverse_kappa", angles, angles[0]),
        ):
            row[score] = {
                "auroc": metrics.auroc(*found),
                "auprc": metrics.auprc(*found),
                "ausc": metrics.ausc(ranks, precision),
            }
        votes = draw_embeddings(la, phi_in, n_samples, seed)
        row["ece"] = metrics.retrieval_ece((u.cpu() for u in votes), data.test.targets)
        rows.append(row)
        print(row, flush=True)
    return rows


def predict(la: Any, z: Tensor, phi: Tensor) -> EmbeddingDistribution:
    """What ``la(x)`` gives, from features that are there already."""
    with torch.no_grad():
        return calibration.judged(la, *la.observe(Features(z, phi))).relative_to(la.typical_norm, la.class_centres)


def markdown(rows: list[dict[str, Any]]) -> str:
    """One table an encoder, seeds averaged."""
    out = ["# The default prior beside its alternatives", ""]
    out += ["Printed by `python -m benchmarks.default_prior`; machine and every seed in `default_prior.json`.", ""]
    for dataset, dim in dict.fromkeys((row["dataset"], row["dim"]) for row in rows):
        mine = [row for row in rows if (row["dataset"], row["dim"]) == (dataset, dim)]
        seeds = sorted({row["seed"] for row in mine})
        out += [f"## {dataset}, dimension {dim}, seeds {', '.join(map(str, seeds))}", ""]
        head = "rule | `novelty`: AUROC | AUPRC | `uncertainty`: AUSC | `1 / kappa`: AUROC | AUPRC | AUSC | ECE"
        out += [f"| {head} |", "|---" * 8 + "|"]
        for name in RULES:
            same = [row for row in mine if row["rule"] == name]
            cells = [
                mean([row[score][column] for row in same]) for score in ("own", "inverse_kappa") for column in COLUMNS
            ]
            cells.append(mean([row["ece"] for row in same]))
            out.append(f"| {name} | " + " | ".join(f"{value:.3f}" for value in cells) + " |")
        out.append("")
    return "\n".join(out)


def mean(values: list[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
