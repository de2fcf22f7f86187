"""How much noise online training bears, and whether the remembered curvature or that of the final weights is better.

Encoders of the paper's Fashion-MNIST network are trained with online LAM from the same seeds, at several temperatures
of the sampled weights, in units of the final posterior's; 5,000 training images are held out, and MNIST's training
images are out of distribution, so that no test image has a say. Each encoder is scored twice: with the discounted
curvature that its training remembers, and with that of its final weights over all pairs of the training set; both are
diagonal, and calibrated with training images.

Run: ``python -m benchmarks.online_temperature --data-root ../shared/data [--dim D] [--seeds S ...] [--out FOLDER]``.
It goes on where it was interrupted: trainings and finished scores are kept in ``--work``.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.experiments.data import load_data
from benchmarks.experiments.data.split import RetrievalData
from benchmarks.experiments.evaluate import evaluate
from benchmarks.experiments.methods import Setting
from benchmarks.experiments.methods.laplace_online import LaplaceOnline
from benchmarks.experiments.plan import COLUMNS
from benchmarks.machine import describe, mean_and_deviation, write_results
from contrastive_curvature.errors import InputError, expected
from contrastive_curvature.laplace.prior import STRENGTH

RESULTS = Path(__file__).parent / "results"
HELD_OUT = 5_000
VOTES = 50
FIGURES = COLUMNS[2]
CURVATURES = {"discounted": "that training remembers", "refitted": "of the final weights"}
STEPS = "steps"
"""The default: the final posterior's temperature, divided by the discounted number of steps."""
TEMPERATURES = ("1", "0.3", "0.1", "0.03", STEPS, "0")
Rows = dict[str, dict[str, dict[str, list[Any]]]]
_TITLES = {"1": "of the final posterior", STEPS: "divided by the number of steps", "0": "0: deterministic training"}


def held_out(root: Path, train_size: int | None, name: str = "fashionmnist", outside: str = "mnist") -> RetrievalData:
    """Training images only: some to train on, some to test on, another data set's as out of distribution."""
    data, other = (load_data(one, root, ood="none") for one in (name, outside))
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(1))
    ood = other.train.take(torch.arange(min(HELD_OUT, len(other.train))))
    train, test = data.train.take(order[HELD_OUT:][:train_size]), data.train.take(order[:HELD_OUT])
    return replace(data, train=train, test=test, ood=ood, ood_title=other.title)


def measure(
    data: RetrievalData, setting: Setting, temperature: str, strength: float, seed: int, folder: Path
) -> dict[str, dict[str, float | None]]:
    """Train once, or go on with it, and score the held-out images with both curvatures.

    Args:
        data: From :func:`held_out`.
        setting: Network and training.
        temperature: One of :data:`TEMPERATURES`.
        strength: Of the final prior.
        seed: Of training and votes.
        folder: For the checkpoint; removed at the end.

    Returns:
        Curvature -> figure -> value.
    """
    value = None if temperature == STEPS else float(temperature)
    method = LaplaceOnline(setting, sampling_temperature=value)
    folder.mkdir(parents=True, exist_ok=True)
    method.fit(data, seed, folder)
    found = {}
    for curvature in CURVATURES:
        if curvature == "refitted":
            method.fit_post_hoc(method.posterior.model.model, data)
        method.posterior.optimize_prior_precision(strength=strength)
        method.calibrate(data)
        scored = evaluate(method, data, n_votes=VOTES, seed=seed)
        found[curvature] = {name: scored.figures[name] for name in FIGURES}
    shutil.rmtree(folder)
    return found


def measured(
    data: RetrievalData, setting: Setting, temperatures: list[str], strength: float, seeds: list[int], work: Path
) -> Rows:
    """All cells, those that are missing computed: temperature -> curvature -> figure -> values of the seeds."""
    identity = {**asdict(setting), "train": len(data.train), "held_out": HELD_OUT, "strength": strength}
    rows: Rows = {
        temperature: {curvature: {name: [] for name in FIGURES} for curvature in CURVATURES}
        for temperature in temperatures
    }
    for seed in seeds:
        for temperature in temperatures:
            kept = work / f"seed{seed}" / f"{temperature}.json"
            if not kept.is_file():
                found = measure(data, setting, temperature, strength, seed, kept.with_suffix(""))
                kept.write_text(json.dumps({"setting": identity, "figures": found}), encoding="utf-8")
            content = json.loads(kept.read_text(encoding="utf-8"))
            if content["setting"] != identity:
                raise InputError(expected("--work", "a folder of the same setting", str(kept), "Choose another one."))
            for curvature, figures in content["figures"].items():
                for name, number in figures.items():
                    rows[temperature][curvature][name].append(number)
    return rows


def render(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    machine = result["machine"]
    seeds = ", ".join(str(seed) for seed in result["seeds"])
    lines = [
        "# Temperature of the sampled weights in online training",
        "",
        f"`python -m benchmarks.online_temperature` on {machine['cpu']}, torch {machine['torch']}, {machine['date']}: "
        f"encoders of {result['dim']} dimensions, seeds {seeds}, {result['train']:,} training images, "
        f"{result['epochs']} epochs, memory factor {result['memory_factor']:g}, final prior "
        f"{result['strength']:g} times the average information; {HELD_OUT:,} held-out training images, "
        "MNIST's training images out of distribution. Mean ± standard deviation over the seeds.",
        "",
        "| temperature while training | curvature | " + " | ".join(FIGURES.values()) + " |",
        "|---|---|" + "---:|" * len(FIGURES),
    ]
    for temperature, row in result["rows"].items():
        for curvature, figures in row.items():
            shown = " | ".join(mean_and_deviation(figures[name]) for name in FIGURES)
            lines.append(f"| {_TITLES.get(temperature, temperature)} | {CURVATURES[curvature]} | {shown} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Measure and write ``online_temperature.json`` and ``online_temperature.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--dim", type=int, default=3)
    parser.add_argument("--train-size", type=int, default=None, help="all that are not held out, if not given")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100])
    parser.add_argument("--temperatures", nargs="+", choices=TEMPERATURES, default=list(TEMPERATURES))
    parser.add_argument("--strength", type=float, default=STRENGTH, help="of the final prior")
    parser.add_argument("--memory-factor", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--work", type=Path, default=Path("runs/online_temperature"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(argv)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    machine = describe()
    data = held_out(given.data_root, given.train_size)
    setting = Setting(dim=given.dim, epochs=given.epochs, n_samples=0, memory_factor=given.memory_factor)
    result = {
        "script": "python -m benchmarks.online_temperature",
        "machine": machine,
        "dim": given.dim,
        "train": len(data.train),
        "epochs": given.epochs,
        "seeds": given.seeds,
        "memory_factor": given.memory_factor,
        "strength": given.strength,
        "rows": measured(data, setting, given.temperatures, given.strength, given.seeds, given.work),
    }
    write_results(given.out, "online_temperature", result, render(result))


if __name__ == "__main__":
    main()
