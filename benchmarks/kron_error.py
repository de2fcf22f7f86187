"""How far Kronecker factors are from the exact curvature of every layer, for each fix, distance and approximation.

A small MLP and a small convolutional network are trained on scikit-learn's digits with the contrastive loss; then the
factors of a batch are compared with the block-diagonal of the exact curvature in relative Frobenius norm.

Run: ``python -m benchmarks.kron_error [--out FOLDER]``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import contrastive_curvature as cc
from benchmarks.machine import describe, write_results

RESULTS = Path(__file__).parent / "results"
POINTS = 200
STEPS = 150
CASES = [("fixed", "expand"), ("psd", "expand")] + [
    (fix, approx) for fix in ("positive", "full") for approx in ("expand", "reduce")
]


def build_networks() -> dict[str, nn.Module]:
    """Two encoders from (N, 64) to (N, 3)."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    conv = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    return {"mlp": mlp.double(), "conv": conv.double()}


def train(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """A few steps of Adam; the last loss per point."""
    loss, optimizer = cc.ContrastiveLoss(), torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    value = torch.zeros(())
    for _ in range(STEPS):
        rows = torch.randint(len(x), (128,), generator=generator)
        value = loss(model(x[rows]), y[rows]) / len(rows)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return float(value.detach())


def measure(model: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Any]]:
    """Relative Frobenius error of every matrix parameter and of all parameters together."""
    rows = []
    names = [name for name, _ in model.named_parameters()]
    for distance in ("arccos", "euclidean"):
        exact: dict[str, Tensor] = {}
        for fix, approx in CASES:
            options: dict[str, Any] = {"distance": distance, "pd_fix": fix, "clamp": False}
            if fix not in exact:
                exact[fix] = cc.ggn(model, x, y, structure="full", **options)
            factors = cc.ggn(model, x, y, structure="kron", kfac_approx=approx, **options)
            layers, start, wrong, size = {}, 0, 0.0, 0.0
            for name, group in zip(names, factors, strict=True):
                found = torch.kron(*group) if len(group) == 2 else group[0]
                block = exact[fix][start : start + len(found), start : start + len(found)]
                start += len(found)
                error, norm = float((found - block).norm()), float(block.norm())
                wrong, size = wrong + error**2, size + norm**2
                layers[name] = error / norm
            total = (wrong / size) ** 0.5
            rows.append({"distance": distance, "pd_fix": fix, "kfac_approx": approx, "total": total, "layers": layers})
    return rows


def render(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    machine = result["machine"]
    lines = [
        "# Kronecker factors against the exact curvature",
        "",
        f"`python -m benchmarks.kron_error` on {machine['cpu']}, torch {machine['torch']}, {machine['date']}: relative "
        f"Frobenius error against the exact block of every parameter, {POINTS} points of scikit-learn's digits, after "
        f"{STEPS} training steps. `total` is that of the whole block-diagonal, biases included. No curvature at all "
        "(zeros) has the error 1, so above 1 the factors are further from the exact blocks than nothing is.",
    ]
    for name, network in result["networks"].items():
        layers = list(network["rows"][0]["layers"])
        lines += ["", f"## {name} (final loss {network['loss']:.3f} a point)", ""]
        lines += ["| distance | fix | approximation | total | " + " | ".join(layers) + " |"]
        lines += ["|---|---|---|" + "--:|" * (len(layers) + 1)]
        for row in network["rows"]:
            values = " | ".join(f"{row['layers'][layer]:.2g}" for layer in layers)
            head = f"| {row['distance']} | {row['pd_fix']} | {row['kfac_approx']} | {row['total']:.2g} "
            lines += [f"{head}| {values} |"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write ``kron_error.json`` and ``kron_error.md``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    data = load_digits()
    x, y = torch.as_tensor(data.data, dtype=torch.float64) / 16, torch.as_tensor(data.target, dtype=torch.long)
    networks = {}
    for name, model in build_networks().items():
        loss = train(model, x[POINTS:], y[POINTS:])
        networks[name] = {"loss": loss, "rows": measure(model, x[:POINTS], y[:POINTS])}
    result = {"script": "python -m benchmarks.kron_error", "machine": describe(), "networks": networks}
    write_results(out, "kron_error", result, render(result))


if __name__ == "__main__":
    main()
