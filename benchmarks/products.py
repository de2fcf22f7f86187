"""Products with the GGN and with the Hessian of a loss over all pairs, in units of one gradient of the same loss.

The GGN is that of :class:`contrastive_curvature.hosts.curvlinops.ContrastiveGGNLinearOperator` (what it computes before
the first product has a column of its own), the Hessian a double backward pass of autograd through loss and network.
Processor time on one thread, the shortest of some turns; on a GPU the clock.

    python -m benchmarks.products [--device cuda] [--quick]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import contrastive_curvature as cc
from benchmarks.all_weights import NETWORKS, OUTPUTS, TITLES, points
from benchmarks.machine import Case, finished, machine_line, measure_cases, table, take_turns
from contrastive_curvature.hosts.curvlinops import ContrastiveGGNLinearOperator

BATCH = 256
LOSSES: dict[str, Callable[[], Any]] = {
    "pairs": lambda: cc.ContrastiveLoss(0.7, pd_fix="full"),
    "anchors": lambda: cc.SupConLoss(0.1, pd_fix="full"),
}
"""A loss of pairs and a loss of anchors."""
POINTS = {"mlp": (256, 2048, 16_384), "resnet18": (256,), "vit": (256,), "minilm": (256,)}
"""Of the large networks, one graph of more points does not fit into memory."""


def run_case(case: Case) -> Case:
    """Return the shortest times of a gradient, of what precedes the first product, and of the products."""
    torch.manual_seed(0)
    device, n, loss = case["device"], case["points"], LOSSES[case["loss"]]()
    net, x = NETWORKS[case["network"]]().eval().to(device), points(case["network"], n)[0].to(device)
    labels = (torch.arange(n) % (n // 8)).to(device)
    params = list(net.parameters())
    batches = list(zip(x.split(BATCH), labels.split(BATCH), strict=True))
    directions = [torch.randn_like(p) for p in params]

    def gradient(graph: bool = False) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(net(x), labels), params, create_graph=graph, materialize_grads=True)

    def hessian_product() -> None:
        # The fast kernels of attention have no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            along = sum((g * v).sum() for g, v in zip(gradient(graph=True), directions, strict=True))
            torch.autograd.grad(along, params, materialize_grads=True)

    def build() -> ContrastiveGGNLinearOperator:
        return ContrastiveGGNLinearOperator(net, loss, None, batches, check_deterministic=False)

    operator = build()
    calls = {
        "gradient": gradient,
        "before": build,
        "ggn": lambda: operator @ directions,
        "hessian": hessian_product,
    }
    clock = time.perf_counter if "cuda" in device else time.process_time
    turns = take_turns({k: finished(call, device) for k, call in calls.items()}, case["turns"], clock=clock)
    return {"seconds": {name: min(seconds) for name, seconds in turns.items()}}


def render(results: Case) -> str:
    """One row for every network, loss and number of points."""
    rows = []
    for case in results["cases"]:
        seconds = case["seconds"]
        units = [f"{seconds[name] / seconds['gradient']:.1f}" for name in ("before", "ggn", "hessian")]
        where = [TITLES[case["network"]], case["loss"], f"{case['points']:,}"]
        rows.append([*where, f"{seconds['gradient']:.2f}", *units])
    text = (
        f"`python -m benchmarks.products`, {machine_line(results['machine'])}; all weights, {OUTPUTS} outputs, `full`, "
        "classes of eight points. Seconds of one gradient of the loss over all pairs; in units of it, what the "
        "operator of the GGN computes before its first product, a product with the GGN, and a product with the "
        "Hessian by a double backward pass of autograd."
    )
    head = ["network", "loss of", "points", "gradient, s", "before the first", "GGN", "Hessian, autograd"]
    return "\n".join(["# Products in units of a gradient", "", text, "", table(head, rows), ""])


def make_cases(given: argparse.Namespace) -> list[Case]:
    sizes = {"mlp": (64,)} if given.quick else POINTS
    same = {"threads": 1, "device": given.device}
    return [
        {"network": name, "loss": loss, "points": n, "turns": 3 if name == "mlp" and n < 5000 else 1, **same}
        for name, many in sizes.items()
        for n in many
        for loss in LOSSES
    ]


def main(arguments: list[str] | None = None) -> Case:
    return measure_cases("products", __doc__, make_cases, run_case, render, arguments)


if __name__ == "__main__":
    main()
