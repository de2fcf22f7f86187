"""Curves and histograms that are small enough for a page."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["decimated", "histogram", "rounded"]

_DIGITS = 5


def rounded(value: float) -> float:
    """A number with five significant digits: shorter in a file, and the same in a plot."""
    return float(f"{value:.{_DIGITS}g}")


def decimated(x: Tensor, y: Tensor, most: int = 200) -> list[tuple[float, float]]:
    """Points of a curve, the first and the last among them.

    Args:
        x: Shape (N,).
        y: Shape (N,).
        most: How many to keep.
    """
    rows = torch.linspace(0, len(x) - 1, min(most, len(x)), dtype=torch.float64).round().long().unique()
    return [(rounded(a), rounded(b)) for a, b in zip(x[rows].tolist(), y[rows].tolist(), strict=True)]


def histogram(edges: list[float], values: Tensor) -> list[float]:
    """Share of the values in each bin; those outside count in the first or the last one."""
    inner = torch.tensor(edges[1:-1], dtype=torch.float64)
    counts = torch.bincount(
        torch.searchsorted(inner, values.double().contiguous(), right=True), minlength=len(edges) - 1
    )
    return [rounded(c / len(values)) for c in counts.tolist()]


def bin_edges(known: Tensor, everything: Tensor, n_bins: int = 40) -> list[float]:
    """Edges of equal width that show the known values well; the last bin takes what is far beyond them.

    Args:
        known: Shape (N,).
        everything: The known and other values, shape (M,).
        n_bins: Number of bins.
    """
    low, high = float(everything.min()), float(everything.max())
    middle, far = float(known.median()), float(known.max())
    high = min(high, far + 2 * (far - middle))
    if not high - low > 1e-9 * max(1.0, abs(low)):
        low, high = low - 0.5, low + 0.5
    step = (high - low) / n_bins
    edges = [low + i * step for i in range(n_bins + 1)]
    return edges if all(map(math.isfinite, edges)) else [0.0, 1.0]
