"""The default prior, temperature and score are right for several encoders, and what the alternatives cost.

Takes run folders of the demo (``python -m contrastive_curvature.demo --out FOLDER``), loads their encoders, fits the
curvature once for each, and compares rules for the prior, each with two scores: the lost length (``uncertainty``) and
the angle (``1 / kappa``).

    python -m benchmarks.default_prior FOLDER [FOLDER ...] --data-root ../shared/data --out benchmarks/results
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import describe
from contrastive_curvature import EmbeddingDistribution, metrics
from contrastive_curvature.demo.config import DemoConfig
from contrastive_curvature.demo.data import Batches, load_data
from contrastive_curvature.demo.networks import make_encoder
from contrastive_curvature.demo.posterior import fit_posterior, read_features, sampled_embeddings
from contrastive_curvature.demo.report import write_atomically
from contrastive_curvature.laplace.covariance import diag_last_layer_variance

COLUMNS = ("auroc", "auprc", "ausc")
_BATCH = 200


def of_strength(strength: float) -> Callable[[Any], None]:
    """The default rule with another strength of the prior."""
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
    "a tenth of the average information, T from the loss (default)": lambda la: la.optimize_prior_precision(),
    "the average information": of_strength(1.0),
    "ten times the average information": of_strength(10.0),
    "unit information, T = 1": at_temperature_one("unit_information"),
    "prior precision 1, T = 1": at_temperature_one("one"),
    "marginal likelihood (scalar), T = 1": at_temperature_one("marglik"),
}


def main() -> None:
    """Compare the rules on every encoder, print the table, write JSON and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of the demo")
    parser.add_argument("--data-root", type=Path, help="where the images are; default: as in the run")
    parser.add_argument("--n-samples", type=int, default=100, help="sampled networks for the ECE")
    parser.add_argument("--seeds", type=int, nargs="+", help="only these seeds of every run")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    given.out.mkdir(parents=True, exist_ok=True)
    for folder in given.runs:
        stored = json.loads((folder / "results.json").read_text(encoding="utf-8"))["config"]
        names = {f.name for f in dataclasses.fields(DemoConfig)}
        kept = {k: v for k, v in stored.items() if k in names} | {"out": None}
        kept["data_root"] = given.data_root or Path(kept["data_root"])
        config = DemoConfig(**kept)
        data = load_data(config)
        for seed in [seed for seed in config.seeds if given.seeds is None or seed in given.seeds]:
            encoder = make_encoder(config.dataset, config.dim)
            encoder.load_state_dict(torch.load(folder / f"encoder_seed{seed}.pt", weights_only=True))
            rows += compare(config, data, encoder.eval(), seed, given.n_samples)
            # After every encoder, so that an interrupted run leaves what it has.
            result = {"machine": describe(), "n_samples": given.n_samples, "rows": rows}
            write_atomically(given.out / "default_prior.json", json.dumps(result, indent=1) + "\n")
            write_atomically(given.out / "default_prior.md", markdown(rows))
    print(markdown(rows))


def compare(config: DemoConfig, data: Any, encoder: Any, seed: int, n_samples: int) -> list[dict[str, Any]]:
    """Figures of every rule on one encoder."""
    device = torch.device(config.device)
    la = fit_posterior(config, encoder.to(device), Batches(data.train_x, data.train_y, _BATCH, device))
    (z_in, phi_in), (z_out, phi_out) = (
        read_features(la, Batches(x, None, _BATCH, device)) for x in (data.test_x, data.ood_x)
    )
    ranking = metrics.rank_by_labels(metrics.nearest_neighbors(z_in, k=10), data.test_y)
    precision = metrics.average_precision_at_k(ranking, 1)
    rows = []
    for name, rule in RULES.items():
        rule(la)
        row: dict[str, Any] = {"dataset": config.dataset, "dim": config.dim, "seed": seed, "rule": name}
        row |= {"training_images": len(data.train_x)}
        row |= {f"map_at_{k}": metrics.map_at_k(ranking, k) for k in (1, 5, 10)}
        row |= {"prior_precision": float(la.prior_precision), "temperature": float(la.temperature)}
        predicted = [predict(la, z, phi) for z, phi in ((z_in, phi_in), (z_out, phi_out))]
        for score in ("uncertainty", "angle"):
            inside, outside = (p.uncertainty if score == "uncertainty" else p.tangential_variance for p in predicted)
            row[score] = {
                "auroc": metrics.auroc(inside, outside),
                "auprc": metrics.auprc(inside, outside),
                "ausc": metrics.ausc(inside, precision),
            }
        votes = sampled_embeddings(la, phi_in, n_samples, seed, "[votes]")
        row["ece"] = metrics.retrieval_ece((u.cpu() for u in votes), data.test_y)
        rows.append(row)
        print(row, flush=True)
    return rows


def predict(la: Any, z: Tensor, phi: Tensor) -> EmbeddingDistribution:
    """What ``la(x)`` gives, from features that are there already."""
    variance = diag_last_layer_variance(phi, la.posterior_variance, z.shape[1])
    return EmbeddingDistribution(z, variance=variance)


def markdown(rows: list[dict[str, Any]]) -> str:
    """One table an encoder, seeds averaged."""
    out = ["# The default prior beside its alternatives", ""]
    out += ["Printed by `python -m benchmarks.default_prior`; machine and every seed in `default_prior.json`.", ""]
    for dataset, dim in dict.fromkeys((row["dataset"], row["dim"]) for row in rows):
        mine = [row for row in rows if (row["dataset"], row["dim"]) == (dataset, dim)]
        seeds = sorted({row["seed"] for row in mine})
        out += [f"## {dataset}, dimension {dim}, seeds {', '.join(map(str, seeds))}", ""]
        head = "rule | lost length: AUROC | AUPRC | AUSC | angle: AUROC | AUPRC | AUSC | ECE"
        out += [f"| {head} |", "|---" * 8 + "|"]
        for name in RULES:
            same = [row for row in mine if row["rule"] == name]
            cells = [
                mean([row[score][column] for row in same]) for score in ("uncertainty", "angle") for column in COLUMNS
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
