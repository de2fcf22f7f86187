"""Products with an output Hessian against a double backward pass of the same loss, in processor time on one thread.

The shortest of two or three turns each. The graph of all pairs of 20,000 points does not fit into memory: there the
double backward pass is that of 5,000 points, times 16.

    python -m benchmarks.output_products [--quick]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import contrastive_curvature as cc
from benchmarks.machine import Case, machine_line, measure_cases, table

LOSSES = {
    "InfoNCE": (lambda: cc.InfoNCELoss(0.1, pd_fix="full"), 2),
    "SupCon": (lambda: cc.SupConLoss(0.1, pd_fix="full"), 100),
    "logistic": (lambda: cc.LogisticLoss(pd_fix="full"), 100),
    "contrastive": (lambda: cc.ContrastiveLoss(0.7, pd_fix="full"), 100),
}
"""Losses, and how many points a class has."""

POINTS, TURNS = (2000, 5000, 20_000), (3, 3, 2)
MOST = 5000
"""Points of which one graph holds all pairs."""

DIM = 32


def seconds(call: Callable[[], Any]) -> float:
    """Return the processor time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def run_case(case: Case) -> Case:
    """Return the shortest times of a double backward pass, of building the Hessian, a product and the diagonal."""
    make, size = LOSSES[case["loss"]]
    loss, n = make(), case["points"]

    def inputs(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        return torch.randn(n, DIM), torch.randn(n, DIM), torch.arange(n) // size

    def double_backward(z: torch.Tensor, v: torch.Tensor, labels: torch.Tensor) -> None:
        raw = z.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(raw, labels), raw, create_graph=True)
        torch.autograd.grad((gradient * v).sum(), raw)

    z, v, labels = inputs(n)
    few = inputs(min(n, MOST))
    turns = []
    for _ in range(case["turns"]):
        backward = seconds(lambda: double_backward(*few)) * (n / len(few[0])) ** 2
        build = seconds(lambda: loss.output_hessian(z, labels))
        hessian = loss.output_hessian(z, labels)
        turns.append((backward, build, seconds(lambda: hessian.matvec(v)), seconds(hessian.diagonal)))  # noqa: B023
    return {"seconds": [min(times) for times in zip(*turns, strict=True)]}


def render(results: Case) -> str:
    """One row for every loss and number of points."""
    rows = []
    for case in results["cases"]:
        backward, *others = case["seconds"]
        rows.append([case["loss"], f"{case['points']:,}", f"{backward:.2f}", *(f"{s / backward:.2f}" for s in others)])
    text = (
        f"`python -m benchmarks.output_products`, {machine_line(results['machine'])}; one thread, processor time, "
        f"{DIM} dimensions, `full`. Seconds of a double backward pass of the loss (beyond {MOST:,} points: that of "
        f"{MOST:,}, times the pairs), and how many times as long the Hessian takes to build, to multiply with a vector "
        "and to give its diagonal."
    )
    head = ["loss", "points", "double backward, s", "building", "product", "diagonal"]
    return "\n".join(["# Products with the output Hessian", "", text, "", table(head, rows), ""])


def make_cases(given: argparse.Namespace) -> list[Case]:
    sizes = [(200, 1)] if given.quick else list(zip(POINTS, TURNS, strict=True))
    return [{"loss": name, "points": n, "turns": turns, "threads": 1} for name in LOSSES for n, turns in sizes]


def main(arguments: list[str] | None = None) -> Case:
    return measure_cases("output_products", __doc__, make_cases, run_case, render, arguments)


if __name__ == "__main__":
    main()
