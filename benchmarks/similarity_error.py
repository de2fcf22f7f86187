"""How far the closed form of ``cc.similarity`` is from samples.

Pairs of Gaussians over raw outputs of norm 1, at five angles from 0 to 180 degrees, for concentrations (``kappa``) from
1 to 1e4 in 2 to 512 dimensions. ``isotropic``: a multiple of the identity. ``elongated``: variances over two decades in
random directions, so that a part of the spread is along the mean; three draws for each case.

Run: ``python -m benchmarks.similarity_error [--samples S] [--out FOLDER]``.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import contrastive_curvature as cc
from benchmarks.machine import describe, write_results

RESULTS = Path(__file__).parent / "results"
DIMS = (2, 3, 8, 32, 128, 512)
KAPPAS = (1.0, 10.0, 100.0, 1e3, 1e4)
ANGLES = (0.0, 22.5, 90.0, 157.5, 180.0)
DRAWS = {"isotropic": 1, "elongated": 3}
_ENTRIES = 2**22


def covariance(shape: str, dim: int, generator: torch.Generator) -> Tensor:
    """A covariance (D, D) of any size."""
    if shape == "isotropic":
        return torch.eye(dim, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64)).Q
    return (turn * torch.logspace(-2, 0, dim, dtype=torch.float64)) @ turn.mT


def of_concentration(kappa: float, mean: Tensor, spread: Tensor) -> cc.EmbeddingDistribution:
    """The distribution whose covariance is a multiple of ``spread`` and whose ``kappa`` is the one given."""
    low, high = 1e-12, 1e12
    for _ in range(100):
        middle = math.sqrt(low * high)
        reached = float(cc.vmf.concentration_from_gaussian(mean, covariance=middle * spread))
        low, high = (middle, high) if reached > kappa else (low, middle)
    return cc.EmbeddingDistribution(mean.unsqueeze(0), covariance=(low * spread).unsqueeze(0))


def cosines(
    a: cc.EmbeddingDistribution, b: cc.EmbeddingDistribution, n_samples: int, generator: torch.Generator
) -> Tensor:
    """Sorted cosines of sampled embeddings."""
    most = max(1, _ENTRIES // a.raw_mean.shape[1])
    parts = []
    for start in range(0, n_samples, most):
        n = min(most, n_samples - start)
        parts.append((a.sample(n, generator) * b.sample(n, generator)).sum(-1).flatten())
    return torch.cat(parts).sort().values


def compare(shape: str, dim: int, kappa: float, n_samples: int) -> list[dict[str, Any]]:
    """Errors at every angle."""
    rows = []
    generator = torch.Generator().manual_seed(dim)
    for angle in ANGLES:
        for _ in range(DRAWS[shape]):
            u, v = torch.zeros(2, dim, dtype=torch.float64)
            u[0], v[0], v[1] = 1, math.cos(math.radians(angle)), math.sin(math.radians(angle))
            a, b = (of_concentration(kappa, mean, covariance(shape, dim, generator)) for mean in (u, v))
            drawn, guess = cosines(a, b, n_samples, generator), cc.similarity(a, b)
            std = float(drawn.std())
            at = torch.arange(0, n_samples, max(1, n_samples // 1000))
            # One column of probabilities, one threshold each.
            column = cc.CosineDistribution(guess.mean.expand(len(at)), guess.variance.expand(len(at)))
            error = (column.probability(drawn[at]) - (1 - at / n_samples)).abs()
            radial = [float(m @ d.covariance[0] @ m) ** 0.5 for m, d in ((u, a), (v, b))]
            row: dict[str, Any] = {"shape": shape, "dim": dim, "kappa": kappa, "angle": angle}
            row |= {"mean_error": abs(float(guess.mean) - float(drawn.mean())) / std}
            row |= {"std_ratio": float(guess.std) / std, "probability_error": float(error.max())}
            rows.append(row | {"radial": max(radial)})
    return rows


def markdown(rows: list[dict[str, Any]], n_samples: int, machine: dict[str, Any]) -> str:
    """One table a shape: the worst over angles and draws."""
    noise = 1.63 / math.sqrt(n_samples)
    out = ["# The closed form of `cc.similarity` against samples", ""]
    out += [
        f"`python -m benchmarks.similarity_error --samples {n_samples}` on {machine['cores']} cores of "
        f"{machine['cpu']}, torch {machine['torch']}, {machine['date']}: two Gaussians over raw outputs, {n_samples} "
        "sampled pairs for each case, angles of 0, 22.5, 90, 157.5 and 180 degrees between the means. A cell has the "
        "worst over the angles (`elongated`: and over three draws) of: the error of the mean in standard deviations of "
        "the cosine; the relative error of the standard deviation; the error of `probability` at the worst threshold. "
        "In one case of a hundred the samples alone differ from their own distribution by more than "
        f"{noise:.3f} in the last number. Radial: the largest standard deviation of the norm, as a share of the norm.",
        "",
    ]
    for shape in DRAWS:
        out += [f"## {shape}", "", "| D | " + " | ".join(f"kappa = {kappa:g}" for kappa in KAPPAS) + " |"]
        out += ["|--:|" + "---|" * len(KAPPAS)]
        for dim in DIMS:
            cells = []
            for kappa in KAPPAS:
                same = [r for r in rows if (r["shape"], r["dim"], r["kappa"]) == (shape, dim, kappa)]
                std = max(abs(r["std_ratio"] - 1) for r in same)
                mean, probability, radial = (
                    max(r[k] for r in same) for k in ("mean_error", "probability_error", "radial")
                )
                cells.append(f"{mean:.2f}, {std:.0%}, {probability:.3f} (radial {radial:.2g})")
            out.append(f"| {dim} | " + " | ".join(cells) + " |")
        out.append("")
    return "\n".join(out)


def main() -> None:
    """Compare, print the tables, write JSON and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    machine = describe()
    rows = [
        row for shape in DRAWS for dim in DIMS for kappa in KAPPAS for row in compare(shape, dim, kappa, given.samples)
    ]
    worst = [
        max((r for r in rows if (r["shape"], r["dim"], r["kappa"]) == (s, d, k)), key=lambda r: r["probability_error"])
        for s in DRAWS
        for d in DIMS
        for k in KAPPAS
    ]
    result = {"machine": machine, "samples": given.samples, "worst": worst}
    write_results(given.out, "similarity_error", result, markdown(rows, given.samples, machine))


if __name__ == "__main__":
    main()
