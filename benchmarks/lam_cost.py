"""What being Bayesian costs on the paper's Fashion-MNIST network: a training step, and a prediction.

Claims measured, each a ratio within one run, the alternatives taking turns:

- a step of online LAM against a deterministic step (the paper reports 1.3 to 2), for every distance and fix, and for
  several samples and all parameters;
- embeddings with uncertainties against a deterministic forward pass (the paper: n samples cost n times);
- rank correlation of the sampling-free uncertainty with that of 1,000 sampled networks.

Run: ``python -m benchmarks.lam_cost --data-root ../shared/data [--device cuda] [--out FOLDER]``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from laplace import Laplace
from scipy.stats import spearmanr
from torch import Tensor, nn

from benchmarks.experiments.data import load_data
from benchmarks.experiments.data.split import loader
from benchmarks.experiments.methods.base import Setting
from benchmarks.experiments.methods.sampled import closed_form
from benchmarks.experiments.methods.training import ContrastiveStep
from benchmarks.experiments.networks import make_network
from benchmarks.gpu.measure import count_flop, describe, finished
from benchmarks.machine import write_results
from contrastive_curvature.online import OnlineLaplace, Trainer

RESULTS = Path(__file__).parent / "results"
BATCH = 64
MARGIN = 0.7
FIXES = ("fixed", "positive", "full", "psd")


def take_turns(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every call; the functions alternate, so that a busy moment of the machine strikes all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def measure_steps(x: Tensor, y: Tensor, dim: int, n_data: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of a training step of every kind, on the images' device, and its ratio to the deterministic one."""

    def step_of(module: nn.Module) -> Callable[[], object]:
        optimizer = torch.optim.RMSprop(module.parameters(), lr=1e-5)

        def step() -> None:
            loss = module(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return step

    def online(**options: Any) -> Callable[[], object]:
        fix = {key: options.pop(key) for key in ("distance", "pd_fix") if key in options}
        return step_of(OnlineLaplace(encoder(), probe=x[:8], n_data=n_data, backend_kwargs=fix, **options))

    def encoder() -> nn.Module:
        torch.manual_seed(0)
        return make_network("fashionmnist", dim).to(x.device, memory_format=torch.channels_last)

    cases = {"deterministic": step_of(ContrastiveStep(encoder(), MARGIN))}
    for distance in ("arccos", "euclidean"):
        for fix in FIXES:
            cases[f"{distance}, {fix}"] = online(distance=distance, pd_fix=fix)
    cases["arccos, fixed, 10 samples"] = online(n_samples=10)
    cases["arccos, fixed, all parameters"] = online(subset_of_weights="all")
    seconds = take_turns({name: finished(case, x.device) for name, case in cases.items()}, rounds)
    own = seconds["deterministic"]
    found = {
        name: {
            "seconds": statistics.median(times),
            "ratio": statistics.median(t / d for t, d in zip(times, own, strict=True)),
        }
        for name, times in seconds.items()
    }
    if x.device.type != "cpu":
        for name, case in cases.items():
            found[name]["flop"] = count_flop(case)
    return found


def measure_prediction(
    data: Any, dim: int, epochs: int, rounds: int, n_samples: int, device: str = "cpu"
) -> dict[str, Any]:
    """Ratio of a prediction to a forward pass, and rank correlations with sampled networks."""
    torch.manual_seed(0)
    encoder = make_network("fashionmnist", dim).to(device, memory_format=torch.channels_last)
    step = ContrastiveStep(encoder, MARGIN)
    batches = loader(data.train, BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))
    Trainer(step, torch.optim.RMSprop(step.parameters(), lr=1e-3), progress=True).fit(batches, epochs)
    la = Laplace(encoder.eval(), "contrastive", backend_kwargs={"margin": MARGIN})
    la.fit(loader(data.train, 200))
    la.optimize_prior_precision()
    images = next(iter(loader(data.test, 200)))[0].to(device)

    def forward() -> Tensor:
        with torch.no_grad():
            return encoder(images)

    def predict() -> Tensor:
        return la(images).uncertainty

    seconds = take_turns({"forward": finished(forward, device), "prediction": finished(predict, device)}, rounds)
    ratios = [p / f for p, f in zip(seconds["prediction"], seconds["forward"], strict=True)]
    setting = Setting(dim=dim, n_samples=n_samples, eval_batch=200, device=device)
    out: dict[str, Any] = {
        "forward_seconds": statistics.median(seconds["forward"]),
        "prediction_seconds": statistics.median(seconds["prediction"]),
        "ratio": statistics.median(ratios),
    }
    if device != "cpu":
        out["forward_flop"], out["prediction_flop"] = count_flop(forward), count_flop(predict)
    for name, split in (("inside", data.test), ("outside", data.ood)):
        predicted = closed_form(la, setting, split)
        kappa, drawn = (predicted.variants[key] for key in ("inverse_kappa", "inverse_kappa_sampled"))
        out[name] = {
            "inverse_kappa": float(spearmanr(kappa, drawn).statistic),
            "uncertainty": float(spearmanr(predicted.uncertainty, sampled_uncertainty(la, split, n_samples)).statistic),
        }
    return out


def sampled_uncertainty(la: Any, split: Any, n_samples: int) -> Tensor:
    """``EmbeddingDistribution.uncertainty`` with the variance of sampled networks, shape (N,), on the CPU."""
    out, device = [], next(la.model.parameters()).device
    for x, _ in loader(split, 200):
        generator = torch.Generator(device).manual_seed(0)
        drawn = la(x.to(device), pred_type="nn", n_samples=n_samples, generator=generator)
        out.append(drawn.uncertainty.cpu())
    return torch.cat(out)


def render(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    machine = result["machine"]
    place = f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads"
    lines = [
        "# What online training and uncertain predictions cost",
        "",
        f"`python -m benchmarks.lam_cost` on {machine.get('accelerator', place)}, "
        f"torch {machine['torch']}, {machine['date']}. The paper's Fashion-MNIST network, batches of {BATCH} for "
        "training and 200 for prediction; medians of alternating calls. Target of a step: 1.25 (the paper: 1.3 to 2); "
        "of a prediction: 1.2.",
        "",
        "| training step | " + " | ".join(f"D = {dim}" for dim in result["dims"]) + " |",
        "|---|" + "---:|" * len(result["dims"]),
    ]
    first = next(iter(result["dims"].values()))
    for name in first["steps"]:
        values = [dim["steps"][name] for dim in result["dims"].values()]
        cells = " | ".join(f"{1000 * v['seconds']:.1f} ms, {v['ratio']:.2f}" for v in values)
        lines.append(f"| {name} | {cells} |")
    lines += [
        "",
        f"Prediction, post-hoc posterior of an encoder after {result['epochs']} epochs on {result['train']:,} images; "
        f"Spearman rank correlations with {result['n_samples']:,} sampled networks on {result['test']:,} test images "
        "(in) and as many MNIST images (out).",
        "",
        "| | " + " | ".join(f"D = {dim}" for dim in result["dims"]) + " |",
        "|---|" + "---:|" * len(result["dims"]),
    ]
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("prediction / forward pass", lambda p: f"{p['ratio']:.2f}"),
        ("1/kappa, in", lambda p: f"{p['inside']['inverse_kappa']:.3f}"),
        ("1/kappa, out", lambda p: f"{p['outside']['inverse_kappa']:.3f}"),
        ("uncertainty, in", lambda p: f"{p['inside']['uncertainty']:.3f}"),
        ("uncertainty, out", lambda p: f"{p['outside']['uncertainty']:.3f}"),
    ]
    for title, cell in rows:
        cells = " | ".join(cell(dim["prediction"]) for dim in result["dims"].values())
        lines.append(f"| {title} | {cells} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Measure and write ``lam_cost.json`` and ``lam_cost.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--dims", type=int, nargs="+", default=[3, 32])
    parser.add_argument("--train-size", type=int, default=60_000)
    parser.add_argument("--test-size", type=int, default=2_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--n-samples", type=int, default=1_000)
    parser.add_argument("--device", default="cpu", help="where torch computes (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(argv)
    machine = describe(given.device)
    data = load_data("fashionmnist", given.data_root, train_size=given.train_size, test_size=given.test_size)
    x, y = (part.to(given.device) for part in next(iter(loader(data.train, BATCH))))
    dims = {
        dim: {
            "steps": measure_steps(x, y, dim, len(data.train), given.rounds),
            "prediction": measure_prediction(data, dim, given.epochs, given.rounds, given.n_samples, given.device),
        }
        for dim in given.dims
    }
    result = {
        "script": "python -m benchmarks.lam_cost",
        "machine": machine,
        "epochs": given.epochs,
        "train": given.train_size,
        "test": given.test_size,
        "n_samples": given.n_samples,
        "dims": dims,
    }
    write_results(given.out, "lam_cost", result, render(result))


if __name__ == "__main__":
    main()
