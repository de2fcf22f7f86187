"""How much noise online training bears: the temperature of the sampled weights against that of the final posterior.

Encoders of the paper's Fashion-MNIST network are trained with online LAM from the same seed, at several temperatures of
the sampled weights; 5,000 training images are held out, and MNIST's training images are out of distribution, so that no
test image has a say.

Run: ``python -m benchmarks.online_temperature --data-root ../shared/data [--dim D] [--out FOLDER]``.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.data import load_data
from benchmarks.data.fashionmnist import mnist_images
from benchmarks.data.split import RetrievalData, TensorSplit, loader
from benchmarks.machine import describe, write_results
from benchmarks.methods import Setting
from benchmarks.methods.sampled import closed_form, sampled_embeddings
from contrastive_curvature import metrics
from contrastive_curvature.demo.train import seed_everything
from contrastive_curvature.online import OnlineLaplace, Trainer

RESULTS = Path(__file__).parent / "results"
HELD_OUT = 5_000
TEMPERATURES: dict[str, float | None] = {
    "of the final posterior": 1.0,
    "a tenth of it": 0.1,
    "divided by the discounted number of steps (default)": None,
    "none: deterministic training": 0.0,
}


def held_out(root: Path, train_size: int) -> RetrievalData:
    """Training images only: some to train on, some to test on, MNIST's as out of distribution."""
    data = load_data("fashionmnist", root)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(1))
    pixels, _ = mnist_images(root, "train", download=False)
    outside = TensorSplit(pixels[:HELD_OUT], torch.zeros(HELD_OUT, dtype=torch.int64))
    train, test = data.train.take(order[HELD_OUT:][:train_size]), data.train.take(order[:HELD_OUT])
    return replace(data, train=train, test=test, ood=outside)


def measure(data: RetrievalData, setting: Setting, temperature: float | None, seed: int) -> dict[str, float]:
    """Train once, and score the held-out images."""
    seed_everything(seed)
    encoder = setting.make_encoder()
    batches = loader(data.train, setting.batch_size, shuffle=True, generator=torch.Generator().manual_seed(seed))
    online = OnlineLaplace(
        encoder,
        probe=next(iter(batches))[0][:8],
        n_data=len(data.train),
        memory_factor=setting.memory_factor,
        sampling_temperature=temperature,
        backend_kwargs={"margin": setting.margin},
    )
    optimizer = torch.optim.RMSprop(online.parameters(), lr=setting.lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, math.exp(-0.1))
    Trainer(online, optimizer, schedule, progress=setting.progress).fit(batches, setting.epochs)
    encoder.eval()
    la = online.laplace()
    inside, outside = (closed_form(la, replace(setting, n_samples=0), split) for split in (data.test, data.ood))
    ranking = metrics.rank_by_labels(metrics.nearest_neighbors(inside.mean, k=10), data.test.targets)
    votes = metrics.retrieval_votes(
        sampled_embeddings(la, setting, data.test, setting.n_samples, seed), data.test.targets
    )
    bins = metrics.calibration_bins(votes, data.test.targets)
    return {
        "map_at_1": metrics.map_at_k(ranking, 1),
        "auroc": metrics.auroc(inside.uncertainty, outside.uncertainty),
        "auprc": metrics.auprc(inside.uncertainty, outside.uncertainty),
        "ausc": metrics.ausc(inside.uncertainty, metrics.average_precision_at_k(ranking, 1)),
        "ece": bins.expected_calibration_error,
    }


def render(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    machine = result["machine"]
    names = {"map_at_1": "mAP@1", "auroc": "AUROC", "auprc": "AUPRC", "ausc": "AUSC", "ece": "ECE"}
    lines = [
        "# Temperature of the sampled weights in online training",
        "",
        f"`python -m benchmarks.online_temperature` on {machine['cpu']}, torch {machine['torch']}, {machine['date']}: "
        f"one encoder of {result['dim']} dimensions each, seed {result['seed']}, {result['train']:,} training images, "
        f"{result['epochs']} epochs, memory factor {result['memory_factor']:g}; {HELD_OUT:,} held-out training images, "
        "MNIST's training images out of distribution.",
        "",
        "| temperature while training | " + " | ".join(names.values()) + " |",
        "|---|" + "---:|" * len(names),
    ]
    for title, row in result["rows"].items():
        lines.append(f"| {title} | " + " | ".join(f"{row[key]:.3f}" for key in names) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Measure and write ``online_temperature.json`` and ``online_temperature.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--dim", type=int, default=3)
    parser.add_argument("--train-size", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--memory-factor", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(argv)
    machine = describe()
    data = held_out(given.data_root, given.train_size)
    setting = Setting(dim=given.dim, epochs=given.epochs, n_samples=50, memory_factor=given.memory_factor)
    rows = {title: measure(data, setting, value, given.seed) for title, value in TEMPERATURES.items()}
    result = {
        "script": "python -m benchmarks.online_temperature",
        "machine": machine,
        "dim": given.dim,
        "train": len(data.train),
        "epochs": given.epochs,
        "seed": given.seed,
        "memory_factor": given.memory_factor,
        "rows": rows,
    }
    write_results(given.out, "online_temperature", result, render(result))


if __name__ == "__main__":
    main()
