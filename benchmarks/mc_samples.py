"""How far an estimate with ``mc_samples=K`` is from the exact curvature, and what it saves.

A small convolutional network and a small transformer with 128 outputs are trained on scikit-learn's digits with the
contrastive loss; then ``diag`` and ``kron`` of a batch, all parameters, are compared with the exact ones in relative
Frobenius norm, over several seeds.

Run: ``python -m benchmarks.mc_samples [--out FOLDER]``.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import contrastive_curvature as cc
from benchmarks.kron_error import train
from benchmarks.machine import describe, measure_time, write_results

RESULTS = Path(__file__).parent / "results"
POINTS, DIM, SEEDS = 128, 128, 5
SAMPLES = (1, 10, 100)


class Transformer(nn.Module):
    """Two blocks on the eight rows of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(8, 32), nn.Parameter(0.1 * torch.randn(1, 8, 32))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
        self.attention = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2))
        self.wide, self.narrow = (nn.ModuleList(nn.Linear(*s) for _ in range(2)) for s in ((32, 64), (64, 32)))
        self.head = nn.Linear(32, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Raw outputs (N, 128) of digits (N, 64)."""
        h = self.embed(x.view(-1, 8, 8)) + self.place
        for k, attention in enumerate(self.attention):
            a = self.norms[2 * k](h)
            h = h + attention(a, a, a, need_weights=False)[0]
            h = h + self.narrow[k](F.gelu(self.wide[k](self.norms[2 * k + 1](h))))
        return self.head(h.mean(1))


def build_networks() -> dict[str, nn.Module]:
    """Two encoders from (N, 64) to (N, 128)."""
    torch.manual_seed(0)
    conv = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, DIM)),
    )
    return {"conv": conv, "transformer": Transformer()}


def flat(curvature: Any) -> Tensor:
    """A diagonal as it is; of Kronecker pairs the curvature factors, flattened."""
    if isinstance(curvature, Tensor):
        return curvature
    return torch.cat([group[0].flatten() for group in curvature])


def measure(model: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Any]]:
    """Relative error and seconds by structure, fix and number of samples."""
    rows = []
    for structure in ("diag", "kron"):
        for fix in ("psd", "fixed"):
            options: dict[str, Any] = {"structure": structure, "pd_fix": fix, "clamp": False}
            exact = flat(cc.ggn(model, x, y, **options))
            row: dict[str, Any] = {"structure": structure, "pd_fix": fix, "samples": {}}
            row["exact_seconds"] = measure_time(lambda options=options: cc.ggn(model, x, y, **options), 2)["seconds"]
            for k in SAMPLES:
                errors = []
                for seed in range(SEEDS):
                    generator = torch.Generator().manual_seed(seed)
                    found = flat(cc.ggn(model, x, y, mc_samples=k, generator=generator, **options))
                    errors.append(float((found - exact).norm() / exact.norm()))
                seconds = measure_time(lambda options=options, k=k: cc.ggn(model, x, y, mc_samples=k, **options), 2)
                row["samples"][k] = {"error": statistics.fmean(errors), "seconds": seconds["seconds"]}
            rows.append(row)
    return rows


def render(result: dict[str, Any]) -> str:
    """The measurement as Markdown."""
    machine = result["machine"]
    lines = [
        "# Estimates with `mc_samples=K`",
        "",
        f"`python -m benchmarks.mc_samples` on {machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}, "
        f"{machine['date']}: {POINTS} points of scikit-learn's digits, {DIM} outputs, all parameters, `arccos`. Error: "
        f"relative Frobenius norm against the exact curvature, mean of {SEEDS} seeds; of `kron` that of the curvature "
        "factors `G` and of the blocks (the input factors `A` are not sampled).",
        "",
        "| network | structure | fix | exact | " + " | ".join(f"K = {k}" for k in SAMPLES) + " |",
        "|---|---|---|" + "--:|" * (len(SAMPLES) + 1),
    ]
    for name, rows in result["networks"].items():
        for row in rows:
            each = " | ".join(f"{v['error']:.2f}, {v['seconds']:.2f} s" for v in row["samples"].values())
            head = f"| {name} | {row['structure']} | {row['pd_fix']} | {row['exact_seconds']:.2f} s "
            lines.append(f"{head}| {each} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write ``mc_samples.json`` and ``mc_samples.md``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    data = load_digits()
    x, y = torch.as_tensor(data.data, dtype=torch.float32) / 16, torch.as_tensor(data.target, dtype=torch.long)
    networks = {}
    for name, model in build_networks().items():
        train(model, x[POINTS:], y[POINTS:])
        networks[name] = measure(model.eval(), x[:POINTS], y[:POINTS])
    result = {"script": "python -m benchmarks.mc_samples", "machine": describe(), "networks": networks}
    write_results(out, "mc_samples", result, render(result))


if __name__ == "__main__":
    main()
