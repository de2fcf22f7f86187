"""Claim: in every host library, the contrastive curvature costs what the host's own classification curvature costs.

For an MLP, the paper's convolutional network and a small ResNet: seconds and peak memory of one batch's curvature in
each backend and structure, beside those of laplace-torch's adapter to the same host for a classification likelihood of
as many outputs. Each ratio is taken in one process, the two sides in turns. The target is 1.3.

    python -m benchmarks.backends [--quick] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from laplace.curvature import BackPackGGN, CurvlinopsGGN, GGNInterface
from laplace.utils import FeatureExtractor
from torch import Tensor, nn

import contrastive_curvature as cc
from benchmarks.experiments import networks
from benchmarks.gpu.measure import count_flop, describe, finished, measure_peak
from benchmarks.machine import run_apart
from contrastive_curvature.testing.contract import make_backend

RESULTS = Path(__file__).parent / "results"
Case = dict[str, Any]
TARGET = 1.3
ENOUGH_SECONDS = 4.0
KEYS = ("network", "backend", "weights", "structure")
OUTPUTS = 10
FIXES = ("fixed", "psd", "positive", "full")
HOSTS = {
    "ContrastiveGGN": GGNInterface,
    "BackPackContrastiveGGN": BackPackGGN,
    "CurvlinopsContrastiveGGN": CurvlinopsGGN,
    "StochManContrastiveGGN": None,
}
"""laplace-torch's adapter to the same host; StochMan 0.3.0 has no curvature of a likelihood."""


class Block(nn.Module):
    """Two convolutions and a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.relu(x + self.body(x))


def make_network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """An encoder with ten outputs, and the shape of its input."""
    if name == "tiny":
        return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, OUTPUTS)), (8,)
    if name == "mlp":
        layers = [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, OUTPUTS)]
        return nn.Sequential(*layers), (784,)
    if name == "paper":
        encoder = networks.make_network("fashionmnist", OUTPUTS)
        for module in encoder.modules():
            if isinstance(module, nn.ReLU):
                # BackPACK's own hooks do not stand layers that work in place.
                module.inplace = False
        return encoder, (1, 28, 28)
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    tail = [nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16 * 16, OUTPUTS)]
    return nn.Sequential(*stem, Block(16), Block(16), *tail), (3, 16, 16)


def make_cases(quick: bool, device: str = "cpu") -> list[Case]:
    points = 6 if quick else 64
    cases = []
    for network in ("tiny",) if quick else ("mlp", "paper", "resnet"):
        for backend in HOSTS:
            # A matrix of the size of all parameters fits nowhere.
            structures = [("last_layer", "diag"), ("last_layer", "kron"), ("last_layer", "full")]
            structures += [("all", "kron"), ("all", "diag")]
            for weights, structure in structures:
                if network == "paper" and (weights, structure) == ("last_layer", "full"):
                    continue  # 92,170 parameters squared
                cases.append(
                    {
                        "network": network,
                        "backend": backend,
                        "weights": weights,
                        "structure": structure,
                        "points": points,
                        "repetitions": 1 if quick else 5,
                        "threads": 2,
                        "device": device,
                    }
                )
    return cases


def run_case(case: Case) -> Case:
    """Seconds and peak MiB of the host's own curvature and of ours with every fix, or why there is none."""
    torch.manual_seed(0)
    model, shape = make_network(case["network"])
    device = case["device"]
    model.eval().to(device)
    x = torch.randn(case["points"], *shape).to(device)
    labels = torch.arange(case["points"], device=device) % OUTPUTS
    sides: dict[str, Callable[[], object]] = {}
    refused: dict[str, str] = {}
    host = HOSTS[case["backend"]]
    attempts = [(fix, partial(contrastive, fix)) for fix in FIXES]
    if host is not None:
        attempts.append(("classification", partial(classification, host)))
    peaks = {}
    for name, make in attempts:
        if name == "classification" and not sides:
            refused[name] = "not measured: there is nothing to compare"
            continue
        try:
            sides[name] = finished(make(model, x, labels, case), device)
            _, peaks[name] = measure_peak(sides[name], device)
        except (cc.UnsupportedError, NotImplementedError, RuntimeError, AttributeError, AssertionError) as error:
            sides.pop(name, None)
            refused[name] = (str(error).splitlines() or [type(error).__name__])[0]
    seconds = take_turns(sides, case["repetitions"])
    out: Case = {
        name: {"seconds": seconds[name], "peak_mib": peaks[name]} if name in seconds else {"refused": refused[name]}
        for name, _ in attempts
    }
    for name in FIXES:
        if name in seconds and "classification" in seconds:
            out[name]["ratio"] = seconds[name] / seconds["classification"]
    if device != "cpu":
        for name, function in sides.items():
            out[name]["flop"] = count_flop(function)
    return out


def classification(host: Any, model: nn.Module, x: Tensor, labels: Tensor, case: Case) -> Callable[[], object]:
    """laplace-torch's adapter with a cross-entropy likelihood."""
    last = case["weights"] == "last_layer"
    wrapped: nn.Module = model
    if last:
        wrapped = FeatureExtractor(model)
        wrapped.find_last_layer(x)
    wrapped.output_size = OUTPUTS
    made = host(wrapped, "classification", last_layer=last)
    return lambda: getattr(made, case["structure"])(x, labels, N=len(x))


def contrastive(fix: str, model: nn.Module, x: Tensor, labels: Tensor, case: Case) -> Callable[[], object]:
    """Our adapter to the same host."""
    made = make_backend(getattr(cc, case["backend"]), model, x, case["weights"], pd_fix=fix)
    return lambda: getattr(made, case["structure"])(x, labels, N=len(x))


def take_turns(sides: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Median seconds of each side; a slow stretch of the machine meets all of them. A slow side runs less often."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repetitions):
        for name, function in sides.items():
            if sum(taken[name]) > ENOUGH_SECONDS:
                continue
            start = time.perf_counter()
            function()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in taken.items()}


def render(results: Case) -> str:
    """Markdown: one row a case."""
    machine = results["machine"]
    place = machine.get("accelerator", f"{machine['cores']} cores of {machine['cpu']}")
    memory = "what was resident" if "accelerator" not in machine else "what it held"
    lines = [
        "# Every host, beside its own classification curvature",
        "",
        f"Printed by `python -m benchmarks.backends` on {place}, torch "
        f"{machine['torch']}, {machine['date']}. One batch of {results['cases'][0]['points']} points, "
        f"{OUTPUTS} outputs, `arccos`. Seconds (MiB of peak memory above {memory}); `x` is the ratio to the "
        f"host's classification curvature in the same process, target {TARGET}; `-`: refused, or none.",
        "",
        "| network | weights | structure | backend | host, classification | " + " | ".join(FIXES) + " |",
        "|" + "---|" * (5 + len(FIXES)),
    ]
    for case in results["cases"]:
        cells = [cell(case.get(name)) for name in ("classification", *FIXES)]
        first = [case["network"], case["weights"], case["structure"], case["backend"]]
        lines.append("| " + " | ".join(first + cells) + " |")
    ratios = [
        (case[fix]["ratio"], case, fix) for case in results["cases"] for fix in FIXES if "ratio" in case.get(fix, {})
    ]
    above = [(ratio, case, fix) for ratio, case, fix in ratios if ratio > TARGET]
    lines += ["", f"{len(ratios) - len(above)} of {len(ratios)} ratios are within {TARGET}.", ""]
    for ratio, case, fix in sorted(above, key=lambda item: -item[0]):
        lines.append(
            f"- {ratio:.2f}: {case['network']}, {case['weights']}, {case['structure']}, {case['backend']}, `{fix}`"
        )
    return "\n".join(lines) + "\n"


def cell(measured: Case | None) -> str:
    if measured is None or "seconds" not in measured:
        return "-"
    ratio = f", {measured['ratio']:.2f} x" if "ratio" in measured else ""
    return f"{measured['seconds']:.4f} s ({measured['peak_mib']:.0f}){ratio}"


def write(results: Case, folder: Path) -> None:
    """After every case, so that an interruption costs one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "backends.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "backends.md").write_text(render(results), encoding="utf-8")


def main(arguments: list[str] | None = None) -> Case:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, in this process; the figures mean nothing")
    parser.add_argument("--network", action="append", help="one of mlp, paper, resnet; all by default")
    parser.add_argument(
        "--resume", action="store_true", help="keep what the result files hold, measure what is missing"
    )
    parser.add_argument("--device", default="cpu", help="where torch computes (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for backends.json and backends.md")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        case = json.loads(options.case)
        torch.set_num_threads(case["threads"])
        measured = run_case(case)
        print(json.dumps(measured))
        return measured
    results: Case = {"machine": describe(options.device), "quick": options.quick, "cases": []}
    if options.resume:
        results = json.loads((options.out / "backends.json").read_text(encoding="utf-8"))
    known = {tuple(case[key] for key in KEYS) for case in results["cases"]}
    wanted = options.network
    cases = [case for case in make_cases(options.quick, options.device) if wanted is None or case["network"] in wanted]
    for case in cases:
        if tuple(case[key] for key in KEYS) in known:
            continue
        print("...", case["network"], case["backend"], case["weights"], case["structure"], file=sys.stderr)
        results["cases"].append(
            {**case, **(run_case(case) if options.quick else run_apart("benchmarks.backends", case))}
        )
        write(results, options.out)
    print(render(results))
    return results


if __name__ == "__main__":
    main()
