"""What the curvature of a loss of anchors costs, beside the loss and its gradient.

Three questions, each in float32 on random embeddings of two views of every input:

- the diagonal of the output Hessian of a large batch: seconds, and the memory above that of its inputs;
- the curvature of a last layer for a batch, ``diag`` and ``kron``, as a multiple of the loss of the batch and its
  gradient in the layer, both timed in turns;
- the same for ``psd``, which decomposes a matrix a point, in fewer dimensions.

Every case runs in a process of its own. Run: ``python -m benchmarks.anchor_losses [--out FOLDER]``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import contrastive_curvature as cc
from benchmarks.machine import describe, measure_peak, measure_time, run_apart, write_results

RESULTS = Path(__file__).parent / "results"
MODULE = "benchmarks.anchor_losses"
LOSSES = {"infonce": cc.InfoNCELoss, "supcon": cc.SupConLoss, "siglip": cc.SigLIPLoss}
ROUNDS = 7

OUTPUTS = [
    {"kind": "output", "loss": loss, "fix": fix, "points": 4096, "dim": 512}
    for loss in LOSSES
    for fix in ("psd_parts", "ggn_fixed")
]
LAYERS = [
    {"kind": "layer", "loss": loss, "fix": fix, "points": 1024, "dim": dim, "features": 512}
    for loss, fix, dim in (
        ("infonce", "psd_parts", 512),
        ("infonce", "ggn_fixed", 512),
        ("supcon", "psd_parts", 512),
        ("supcon", "ggn_fixed", 512),
        ("siglip", "psd_parts", 512),
        ("supcon", "psd_parts", 64),
        ("supcon", "psd", 64),
    )
]


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Measure one case.

    Args:
        case: One of :data:`OUTPUTS` or :data:`LAYERS`.
    """
    torch.manual_seed(0)
    n, dim = case["points"], case["dim"]
    loss, labels = LOSSES[case["loss"]](pd_fix=case["fix"]), torch.arange(n) // 2
    if case["kind"] == "output":
        z = torch.randn(n, dim)
        # Threads and libraries are set up by a small call.
        loss.output_hessian(z[:64], labels[:64]).diagonal()
        _, peak = measure_peak(lambda: loss.output_hessian(z, labels).diagonal())
        return {**case, "peak_mib": peak, **measure_time(lambda: loss.output_hessian(z, labels).diagonal(), 3)}
    layer, x = nn.Linear(case["features"], dim), torch.randn(n, case["features"])
    model = nn.Sequential(layer)

    def gradient() -> None:
        model.zero_grad()
        loss(model(x), labels).backward()

    def curvature(structure: str) -> None:
        cc.ggn(model, x, labels, loss=loss, structure=structure, subset_of_weights="last_layer", clamp=False)

    calls = {"gradient": gradient, "diag": lambda: curvature("diag"), "kron": lambda: curvature("kron")}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(ROUNDS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if round_:
                seconds[name].append(time.perf_counter() - start)
    best = {name: min(values) for name, values in seconds.items()}
    ratios = {f"{name}_ratio": best[name] / best["gradient"] for name in ("diag", "kron")}
    return {**case, **{f"{name}_seconds": value for name, value in best.items()}, **ratios}


def table(cases: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# What the curvature of a loss of anchors costs",
        "",
        f"`python -m {MODULE}`, {machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, load "
        f"{machine['load']} at the start, {machine['date']}. float32; the fastest of several calls.",
        "",
        "Diagonal of the output Hessian, all points candidates of each other:",
        "",
        "| loss | `pd_fix` | points | dimensions | seconds | MiB above the inputs |",
        "|---|---|---|---|---|---|",
    ]
    for c in (c for c in cases if c["kind"] == "output"):
        cells = [c["loss"], f"`{c['fix']}`", c["points"], c["dim"], f"{c['seconds']:.2f}", f"{c['peak_mib']:.0f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "Last layer, as a multiple of the loss of the batch and its gradient in the layer:",
        "",
        "| loss | `pd_fix` | points | features | dimensions | loss and gradient, ms | `diag` | `kron` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for c in (c for c in cases if c["kind"] == "layer"):
        cells = [c["loss"], f"`{c['fix']}`", c["points"], c["features"], c["dim"]]
        cells += [f"{1000 * c['gradient_seconds']:.0f}", f"{c['diag_ratio']:.1f}", f"{c['kron_ratio']:.1f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure everything and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case is not None:
        print(json.dumps(run(given.case)))
        return
    machine = describe()
    cases = [run_apart(MODULE, case) for case in (*OUTPUTS, *LAYERS)]
    write_results(given.out, "anchor_losses", {"machine": machine, "cases": cases}, table(cases, machine))


if __name__ == "__main__":
    main()
