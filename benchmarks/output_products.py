"""Products with an output Hessian against a double backward pass of the same loss, in processor time on one thread.

python -m benchmarks.output_products [--points 5000]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import contrastive_curvature as cc
from benchmarks.machine import describe, machine_line

LOSSES = {
    "InfoNCE": (lambda: cc.InfoNCELoss(0.1, pd_fix="full"), 2),
    "SupCon": (lambda: cc.SupConLoss(0.1, pd_fix="full"), 100),
    "logistic": (lambda: cc.LogisticLoss(pd_fix="full"), 100),
    "contrastive": (lambda: cc.ContrastiveLoss(0.7, pd_fix="full"), 100),
}
"""Losses, and how many points a class has."""


def seconds(call: Callable[[], Any]) -> float:
    """Return the processor time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    """Print a line for each loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=5000)
    n = parser.parse_args().points
    torch.set_num_threads(1)
    print(machine_line(describe()))
    for name, (make, size) in LOSSES.items():
        torch.manual_seed(0)
        z, v, labels, loss = torch.randn(n, 32), torch.randn(n, 32), torch.arange(n) // size, make()

        def double_backward() -> None:
            raw = z.clone().requires_grad_()  # noqa: B023
            (gradient,) = torch.autograd.grad(loss(raw, labels), raw, create_graph=True)  # noqa: B023
            torch.autograd.grad((gradient * v).sum(), raw)  # noqa: B023

        backward = seconds(double_backward)
        build = seconds(lambda: loss.output_hessian(z, labels))  # noqa: B023
        hessian = loss.output_hessian(z, labels)
        product, diagonal = seconds(lambda: hessian.matvec(v)), seconds(hessian.diagonal)  # noqa: B023
        print(
            f"{name}: double backward {backward:.2f} s, product {product / backward:.2f}, building "
            f"{build / backward:.2f}, diagonal {diagonal / backward:.2f} times that",
            flush=True,
        )


if __name__ == "__main__":
    main()
