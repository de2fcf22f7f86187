"""Claim: in every host library, the contrastive curvature costs what the host's own classification curvature costs.

For an MLP, the paper's convolutional network and a small ResNet: seconds and peak memory of one batch's curvature in
each backend and structure, beside those of laplace-torch's adapter to the same host for a classification likelihood of
as many outputs. Each ratio is taken in one process, the two sides in turns.

    python -m benchmarks.backends [--device cuda] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from laplace.curvature import BackPackGGN, GGNInterface
from laplace.utils import FeatureExtractor
from torch import Tensor, nn

import contrastive_curvature as cc
from benchmarks.experiments import training
from benchmarks.machine import Case, count_flop, finished, machine_line, measure_cases, measure_peak, table, take_turns
from contrastive_curvature.testing.contract import make_backend

ENOUGH_SECONDS = 4.0
OUTPUTS = 10
FIXES = ("fixed", "psd", "positive", "full")
HOSTS = {
    "ContrastiveGGN": GGNInterface,
    "BackPackContrastiveGGN": BackPackGGN,
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
        encoder = training.make_network("fashionmnist", OUTPUTS)
        for module in encoder.modules():
            if isinstance(module, nn.ReLU):
                # BackPACK's own hooks do not stand layers that work in place.
                module.inplace = False
        return encoder, (1, 28, 28)
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    tail = [nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16 * 16, OUTPUTS)]
    return nn.Sequential(*stem, Block(16), Block(16), *tail), (3, 16, 16)


def make_cases(given: argparse.Namespace) -> list[Case]:
    # A matrix of the size of all parameters fits nowhere.
    parts = [("last_layer", "diag"), ("last_layer", "kron"), ("last_layer", "full"), ("all", "kron"), ("all", "diag")]
    sizes = {"points": 6, "repetitions": 1} if given.quick else {"points": 64, "repetitions": 5}
    return [
        {"network": network, "backend": backend, "weights": weights, "structure": structure}
        | {**sizes, "threads": 2, "device": given.device}
        for network in (("tiny",) if given.quick else ("mlp", "paper", "resnet"))
        for backend in HOSTS
        for weights, structure in parts
        if (network, weights, structure) != ("paper", "last_layer", "full")  # 92,170 parameters squared
    ]


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
    turns = take_turns(sides, case["repetitions"], ENOUGH_SECONDS)
    seconds = {name: statistics.median(taken) for name, taken in turns.items()}
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


def render(results: Case) -> str:
    """One row a case."""
    head = ["network", "weights", "structure", "backend", "host, classification", *FIXES]
    rows = [
        [case["network"], case["weights"], case["structure"], case["backend"]]
        + [cell(case.get(name)) for name in ("classification", *FIXES)]
        for case in results["cases"]
    ]
    text = (
        f"`python -m benchmarks.backends`, {machine_line(results['machine'])}. One batch of "
        f"{results['cases'][0]['points']} points, {OUTPUTS} outputs, `arccos`. Seconds (MiB of memory at its "
        "highest above what was held); `x` is the ratio to the host's classification curvature in the same process; "
        "`-`: refused, or none."
    )
    return f"# Every host, beside its own classification curvature\n\n{text}\n\n{table(head, rows)}\n"


def cell(measured: Case | None) -> str:
    if measured is None or "seconds" not in measured:
        return "-"
    ratio = f", {measured['ratio']:.2f} x" if "ratio" in measured else ""
    return f"{measured['seconds']:.4f} s ({measured['peak_mib']:.0f}){ratio}"


def main(arguments: list[str] | None = None) -> Case:
    return measure_cases("backends", __doc__, make_cases, run_case, render, arguments)


if __name__ == "__main__":
    main()
