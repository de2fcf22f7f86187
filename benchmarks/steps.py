"""What curvature costs beside a training step, both in one process and in turns.

- ``online``: a step of ``OnlineLaplace`` on the paper's Fashion-MNIST network (64 random images), beside a step with
  the contrastive loss alone, for every distance and fix, several samples and all parameters (the paper: 1.3 to 2).
- ``layer``: the curvature of a last layer with 512 features for 1,024 points (two views of every input) and a loss of
  anchors, beside the loss and its gradient in that layer.
- ``output``: the diagonal of such a loss's output Hessian for 4,096 points in 512 dimensions, and its memory.

    python -m benchmarks.steps [--device cuda] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import contrastive_curvature as cc
from benchmarks import machine
from benchmarks.experiments.training import NETWORKS, ContrastiveStep, make_network
from contrastive_curvature.online import OnlineLaplace

LOSSES = {"infonce": cc.InfoNCELoss, "supcon": cc.SupConLoss, "siglip": cc.SigLIPLoss}
ANCHORS = [(name, fix) for name in LOSSES for fix in ("psd_parts", "ggn_fixed")]
N_DATA = 60_000


def make_cases(given: argparse.Namespace) -> list[machine.Case]:
    quick = given.quick
    online, layer, output = (4, 8, 16) if quick else (64, 1024, 4096)
    network = "digits" if quick else "fashionmnist"
    cases: list[machine.Case] = [
        {"kind": "online", "network": network, "dim": dim, "points": online} for dim in ((3,) if quick else (3, 32))
    ]
    for name, fix in [*ANCHORS, ("supcon", "psd")]:
        dim = 8 if quick else 64 if fix == "psd" else 512
        cases.append({"kind": "layer", "loss": name, "fix": fix, "points": layer, "dim": dim})
    for name, fix in ANCHORS:
        cases.append({"kind": "output", "loss": name, "fix": fix, "points": output, "dim": 8 if quick else 512})
    return [{**case, "threads": 2, "rounds": 1 if quick else 15, "device": given.device} for case in cases]


def run_case(case: machine.Case) -> machine.Case:
    """Median seconds of every call, and what the ratios of its turns to those of the first call are."""
    torch.manual_seed(0)
    device = case["device"]
    if case["kind"] == "output":
        loss, labels = LOSSES[case["loss"]](pd_fix=case["fix"]), torch.arange(case["points"], device=device) // 2
        z = torch.randn(case["points"], case["dim"], device=device)
        loss.output_hessian(z[:64], labels[:64]).diagonal()  # sets up threads and libraries

        def diagonal() -> Tensor:
            return loss.output_hessian(z, labels).diagonal()

        _, peak = machine.measure_peak(diagonal, device)
        return {"peak_mib": peak, **machine.measure_time(diagonal, min(case["rounds"], 3), device)}
    calls = (online_calls if case["kind"] == "online" else layer_calls)(case)
    for call in calls.values():
        call()
    seconds = machine.take_turns({name: machine.finished(call, device) for name, call in calls.items()}, case["rounds"])
    first = next(iter(seconds.values()))
    found = {
        name: {
            "seconds": statistics.median(times),
            "ratio": statistics.median(mine / theirs for mine, theirs in zip(times, first, strict=True)),
        }
        for name, times in seconds.items()
    }
    if device != "cpu":
        for name, call in calls.items():
            found[name]["flop"] = machine.count_flop(call)
    return {"calls": found}


def online_calls(case: machine.Case) -> dict[str, Callable[[], object]]:
    """Training steps, the deterministic one first."""
    device, n = case["device"], case["points"]
    x, y = torch.rand(n, *NETWORKS[case["network"]], device=device), torch.arange(n, device=device) % 10

    def encoder() -> nn.Module:
        return make_network(case["network"], case["dim"]).to(device, memory_format=torch.channels_last)

    def step_of(module: nn.Module) -> Callable[[], object]:
        optimizer = torch.optim.RMSprop(module.parameters(), lr=1e-5)

        def step() -> None:
            loss = module(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return step

    def online(distance: str = "arccos", pd_fix: str = "fixed", **more: Any) -> Callable[[], object]:
        kind = {"distance": distance, "pd_fix": pd_fix}
        return step_of(OnlineLaplace(encoder(), probe=x[:8], n_data=N_DATA, backend_kwargs=kind, **more))

    calls = {"deterministic": step_of(ContrastiveStep(encoder(), 0.7))}
    for distance in ("arccos", "euclidean"):
        for fix in ("fixed", "psd", "positive", "full"):
            calls[f"{distance}, {fix}"] = online(distance, fix)
    calls["arccos, fixed, 10 samples"] = online(n_samples=10)
    calls["arccos, fixed, all parameters"] = online(subset_of_weights="all")
    return calls


def layer_calls(case: machine.Case) -> dict[str, Callable[[], object]]:
    """The loss and its gradient in a last layer, and its curvature in two structures."""
    device, n = case["device"], case["points"]
    loss, labels = LOSSES[case["loss"]](pd_fix=case["fix"]), torch.arange(n, device=device) // 2
    model, x = nn.Sequential(nn.Linear(512, case["dim"])).to(device), torch.randn(n, 512, device=device)

    def gradient() -> None:
        model.zero_grad()
        loss(model(x), labels).backward()

    def curvature(structure: str) -> Callable[[], object]:
        options: dict[str, Any] = {"structure": structure, "subset_of_weights": "last_layer", "clamp": False}
        return lambda: cc.ggn(model, x, labels, loss=loss, **options)

    return {"gradient": gradient, "diag": curvature("diag"), "kron": curvature("kron")}


def render(results: machine.Case) -> str:
    """A table for each kind."""
    cases = results["cases"]
    out = [
        "# What curvature costs beside a training step",
        "",
        f"`python -m benchmarks.steps`, {machine.machine_line(results['machine'])}. Medians of calls in turns, and of "
        "the ratios of their turns to those of the first call.",
    ]
    online, layer, output = ([c for c in cases if c["kind"] == kind] for kind in ("online", "layer", "output"))
    rows = [
        [name, *(f"{1e3 * c['calls'][name]['seconds']:.1f} ms, {c['calls'][name]['ratio']:.2f}" for c in online)]
        for name in (online[0]["calls"] if online else ())
    ]
    out += ["", machine.table(["step of 64 images", *(f"D = {c['dim']}" for c in online)], rows), ""]
    head = ["loss", "`pd_fix`", "points", "dimensions"]
    rows = [
        [c["loss"], f"`{c['fix']}`", c["points"], c["dim"], f"{1e3 * c['calls']['gradient']['seconds']:.0f}"]
        + [f"{c['calls'][name]['ratio']:.1f}" for name in ("diag", "kron")]
        for c in layer
    ]
    out += [machine.table([*head, "loss and gradient, ms", "`diag`, times", "`kron`, times"], rows), ""]
    rows = [
        [c["loss"], f"`{c['fix']}`", c["points"], c["dim"], f"{c['seconds']:.2f}", f"{c['peak_mib']:.0f}"]
        for c in output
    ]
    out += [machine.table([*head, "diagonal of the output Hessian, s", "MiB above the inputs"], rows), ""]
    return "\n".join(out)


def main(arguments: list[str] | None = None) -> machine.Case:
    return machine.measure_cases("steps", __doc__, make_cases, run_case, render, arguments)


if __name__ == "__main__":
    main()
