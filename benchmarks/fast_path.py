"""Claim: the exact diagonal of all parameters takes little more than the backward passes that exactness needs.

For an MLP and the paper's convolutional network: ``cc.ggn`` of every fix beside BackPACK's ``DiagGGNExact`` of a
cross-entropy loss with as many outputs (target: 1.5 times). For a small vision transformer and a small residual
network, which BackPACK refuses: beside one backward pass of the batch for each output (target: 3 times, below 2 GiB).
For a network that is one linear layer: seconds (targets: 0.05 s and 2 s, below 4 GiB). Both sides run in one process,
in turns.

    python -m benchmarks.fast_path [--quick]
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from laplace.curvature import BackPackGGN
from torch import Tensor, nn
from torch.nn import functional as F

import contrastive_curvature as cc
from benchmarks.backends import FIXES, make_network, take_turns
from benchmarks.machine import describe, measure_peak, run_apart, write_results

RESULTS = Path(__file__).parent / "results"
Case = dict[str, Any]
CLASSES = 10


class TransformerBlock(nn.Module):
    """Attention and an MLP, each after a layer norm and beside a skip connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        q, k, v = self.qkv(self.before_attention(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.before_mlp(x))
        return out


class VisionTransformer(nn.Module):
    """Patches of four pixels, a class token and learned positions."""

    def __init__(self, width: int, blocks: int, outputs: int, size: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // 4) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, 4) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        tokens = self.patches(x).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], dim=1) + self.positions
        out: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return out


def make_cases(quick: bool) -> list[Case]:
    """Networks with what each is compared to."""
    points, times = (6, 1) if quick else (64, 5)
    cases: list[Case] = [
        {"network": name, "points": points, "beside": "BackPACK", "target": 1.5}
        for name in (("tiny",) if quick else ("mlp", "paper"))
    ]
    sizes: list[Case] = [{"network": "transformer", "size": 8 if quick else 32}, {"network": "resnet"}]
    cases += [{**size, "points": points, "beside": "passes", "target": 3.0} for size in sizes]
    linear = [(8, 4, 6, 0.05)] if quick else [(512, 256, 128, 0.05), (2048, 2048, 128, 2.0)]
    cases += [
        {"network": "linear", "features": f, "outputs": d, "points": n, "beside": None, "target_seconds": seconds}
        for f, d, n, seconds in linear
    ]
    return [{**case, "repetitions": times, "threads": 2} for case in cases]


def run_case(case: Case) -> Case:
    """Seconds and peak memory of every side."""
    torch.manual_seed(0)
    if case["network"] == "transformer":
        model: nn.Module = VisionTransformer(96, 4, 32, case["size"])
        shape: tuple[int, ...] = (3, case["size"], case["size"])
    elif case["network"] == "linear":
        model, shape = nn.Linear(case["features"], case["outputs"]), (case["features"],)
    else:
        model, shape = make_network(case["network"])
    model.eval()
    x, labels = torch.randn(case["points"], *shape), torch.arange(case["points"]) % CLASSES
    beside = {"BackPACK": backpack, "passes": passes, None: None}[case["beside"]]
    sides = {fix: partial(cc.ggn, model, x, labels, pd_fix=fix, structure="diag") for fix in FIXES}
    if beside is not None:
        sides = {"beside": partial(beside, model, x, labels), **sides}
    # The high-water mark of a process only rises: a side that stays below an earlier one counts from there.
    peaks = {name: measure_peak(side)[1] for name, side in sides.items()}
    seconds = take_turns(sides, case["repetitions"])
    out: Case = {name: {"seconds": seconds[name], "peak_mib": peaks[name]} for name in sides}
    for fix in FIXES:
        if beside is not None:
            out[fix]["ratio"] = seconds[fix] / seconds["beside"]
    out["process_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return out


def backpack(model: nn.Module, x: Tensor, labels: Tensor) -> object:
    """BackPACK's exact diagonal of a cross-entropy loss, through laplace-torch."""
    model.output_size = CLASSES  # type: ignore[assignment]
    return BackPackGGN(model, "classification").diag(x, labels, N=len(x))


def passes(model: nn.Module, x: Tensor, _: Tensor) -> object:
    """One backward pass to all parameters for each output."""
    params = list(model.parameters())
    z = model(x)
    for axis in torch.eye(z.shape[1]):
        torch.autograd.grad(z, params, axis.expand_as(z), retain_graph=True)
    return None


def render(results: Case) -> str:
    """Markdown: one row a case."""
    machine = results["machine"]
    lines = [
        "# The exact diagonal of all parameters",
        "",
        f"Printed by `python -m benchmarks.fast_path` on {machine['cores']} cores of {machine['cpu']}, torch "
        f"{machine['torch']}, {machine['date']}, load {machine['load']} at the start. One batch, `arccos`, "
        "`cc.ggn(structure='diag')` with the analysis of the encoder and the comparison with autograd. Seconds (MiB of "
        "peak memory above what was resident); `x` is the ratio to the side beside it in the same process: BackPACK's "
        "`DiagGGNExact` of a classification loss, or one backward pass of the batch for each output.",
        "",
        "| network | points | beside | target | its seconds | " + " | ".join(FIXES) + " | process, MiB |",
        "|" + "---|" * (6 + len(FIXES)),
    ]
    for case in results["cases"]:
        target = f"{case['target']} x" if "target" in case else f"{case['target_seconds']} s"
        name = case["network"] + (f" {case['features']} -> {case['outputs']}" if case["network"] == "linear" else "")
        first = [name, str(case["points"]), case["beside"] or "-", target, cell(case.get("beside_result"))]
        cells = [cell(case[fix]) for fix in FIXES]
        lines.append("| " + " | ".join([*first, *cells, f"{case['process_mib']:.0f}"]) + " |")
    return "\n".join(lines) + "\n"


def cell(measured: Case | None) -> str:
    """Seconds, memory and ratio of one side."""
    if measured is None:
        return "-"
    ratio = f", {measured['ratio']:.2f} x" if "ratio" in measured else ""
    return f"{measured['seconds']:.4f} s ({measured['peak_mib']:.0f}){ratio}"


def main(arguments: list[str] | None = None) -> Case:
    """Measure everything, and write the result files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, in this process; the figures mean nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for fast_path.json and fast_path.md")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        case = json.loads(options.case)
        torch.set_num_threads(case["threads"])
        measured = run_case(case)
        print(json.dumps(measured))
        return measured
    results: Case = {"machine": describe(), "quick": options.quick, "cases": []}
    for case in make_cases(options.quick):
        print("...", case["network"], file=sys.stderr)
        measured = run_case(case) if options.quick else run_apart("benchmarks.fast_path", case)
        beside = measured.pop("beside", None)
        results["cases"].append({**case, **measured, **({"beside_result": beside} if beside else {})})
    write_results(options.out, "fast_path", results, render(results))
    return results


if __name__ == "__main__":
    main()
