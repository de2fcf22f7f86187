"""Claim: the exact diagonal of all parameters takes little more than the backward passes that exactness needs.

For an MLP and the paper's convolutional network: ``cc.ggn`` of every fix beside BackPACK's ``DiagGGNExact`` of a
cross-entropy loss with as many outputs. For a small vision transformer and a small residual network, which BackPACK
refuses: beside one backward pass of the batch for each output. For a network that is one linear layer: seconds. Both
sides run in one process, in turns.

    python -m benchmarks.fast_path [--quick]
"""

from __future__ import annotations

import argparse
import copy
import time
from functools import partial

import torch
from laplace.curvature import BackPackGGN
from torch import Tensor, nn
from torch.nn import functional as F

import contrastive_curvature as cc
from benchmarks.backends import ENOUGH_SECONDS, FIXES, cell, make_network
from benchmarks.machine import Case, machine_line, measure_cases, measure_peak, table, take_turns

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


def make_cases(given: argparse.Namespace) -> list[Case]:
    """Networks with what each is compared to."""
    quick = given.quick
    points, times, size = (6, 1, 8) if quick else (64, 5, 32)
    cases: list[Case] = [
        {"network": name, "points": points, "beside": "BackPACK"} for name in (("tiny",) if quick else ("mlp", "paper"))
    ]
    for name in ("transformer", "resnet"):
        cases.append({"network": name, "size": size, "points": points, "beside": "passes"})
    for width, dim, n in [(8, 4, 6)] if quick else [(512, 256, 128), (2048, 2048, 128)]:
        cases.append({"network": "linear", "features": width, "outputs": dim, "points": n, "beside": None})
    return [{**case, "repetitions": times, "threads": 1} for case in cases]


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
    encoder = cc.Encoder(model, x)
    sides = {fix: partial(cc.ggn, encoder, x, labels, pd_fix=fix, structure="diag") for fix in FIXES}
    sides["analysed"] = partial(cc.ggn, model, x, labels, pd_fix="fixed", structure="diag")
    if beside is not None:
        # A copy, as BackPACK's hooks stay on its modules.
        sides = {"beside": partial(beside, copy.deepcopy(model), x, labels), **sides}
    # The high-water mark of a process only rises: a side that stays below an earlier one counts from there.
    peaks = {name: measure_peak(side)[1] for name, side in sides.items()}
    at_least = 2.0 if case["repetitions"] > 1 else 0.0
    turns = take_turns(sides, case["repetitions"], ENOUGH_SECONDS, at_least, clock=time.process_time)
    seconds = {name: min(taken) for name, taken in turns.items()}
    out: Case = {name: {"seconds": seconds[name], "peak_mib": peaks[name]} for name in sides}
    for name in (*FIXES, "analysed"):
        if beside is not None:
            out[name]["ratio"] = seconds[name] / seconds["beside"]
    return {name.replace("beside", "beside_result"): found for name, found in out.items()}


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
    """One row a case."""
    rows = []
    for case in results["cases"]:
        name = case["network"] + (f" {case['features']} -> {case['outputs']}" if case["network"] == "linear" else "")
        first = [name, case["points"], case["beside"] or "-", cell(case.get("beside_result"))]
        rows.append([*first, *(cell(case[name]) for name in (*FIXES, "analysed"))])
    text = (
        f"`python -m benchmarks.fast_path`, {machine_line(results['machine'])}. One batch, `arccos`, "
        "`cc.ggn(structure='diag')` with all that it checks, of a kept `cc.Encoder`, and in the last column of the "
        "module, which it then analyses in every call. Seconds of one thread by the processor, the fastest of several "
        "calls (MiB of memory at its highest above what was held); `x` is the ratio to the side beside it in the same "
        "process: BackPACK's `DiagGGNExact` of a classification loss, or a backward pass of the batch for each output."
    )
    head = ["network", "points", "beside", "its seconds", *FIXES, "fixed, analysed in every call"]
    return f"# The exact diagonal of all parameters\n\n{text}\n\n{table(head, rows)}\n"


def main(arguments: list[str] | None = None) -> Case:
    return measure_cases("fast_path", __doc__, make_cases, run_case, render, arguments)


if __name__ == "__main__":
    main()
