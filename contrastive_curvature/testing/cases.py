"""Random cases for the property tests: points, pairs, options and small networks. All are float64 and seeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from contrastive_curvature.testing.networks import NETWORKS, build_network, make_inputs
from contrastive_curvature.testing.oracle import dense_ggn, dense_jacobian, list_pairs, pair_weights

FIXES = ("positive", "fixed", "full", "psd")
DISTANCES = ("arccos", "euclidean")
NORMALIZATIONS = ("sum", "type", "anchor")


@dataclass
class Case:
    """N points with their pairs."""

    z: Tensor
    labels: Tensor | None = None
    pairs: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def given(self) -> dict[str, Any]:
        """Labels and pairs."""
        return {"labels": self.labels, "pairs": self.pairs}

    @property
    def all(self) -> dict[str, Any]:
        """Labels, pairs and options."""
        return {**self.given, **self.options}

    def to(self, device: str) -> Case:
        """Return the case on another device."""
        pairs = self.pairs
        if isinstance(pairs, tuple):
            pairs = tuple(t.to(device) for t in pairs)
        labels = None if self.labels is None else self.labels.to(device)
        return Case(self.z.to(device), labels, pairs, self.options)


def close(a: Tensor, b: Tensor, scale: Tensor | float | None = None, tolerance: float = 1e-10) -> bool:
    """Return whether the error is small relative to the largest entry, or to ``scale`` if ``b`` may cancel to zero."""
    size = max(float(b.abs().max()) if b.numel() else 0.0, float(scale or 0.0))
    error = float((a - b).abs().max()) if b.numel() else 0.0
    return a.shape == b.shape and error <= tolerance * size + 1e-300


options = st.fixed_dictionaries(
    {
        "distance": st.sampled_from(DISTANCES),
        "pd_fix": st.sampled_from(FIXES),
        "margin": st.sampled_from((None, 0.3, 0.7, 1.3, 2.0)),
        "negative_weight": st.sampled_from((0.0, 0.2, 0.5, 0.9, 1.0)),
        "normalization": st.sampled_from(NORMALIZATIONS),
    }
)


def relate_by_remainder(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a symmetric relation in which some pairs are neither positive nor negative."""
    gap = (a[:, None] - b[None, :]).abs() % 4
    return gap == 0, gap == 1


@st.composite
def pair_kinds(
    draw: st.DrawFn, n: int, generator: torch.Generator, by_target: bool = False
) -> tuple[Tensor | None, Any]:
    """Draw labels (from one class to all different), triplets or 4-tuples with repetitions, masks, or a callable."""
    kinds = ("labels", "callable", "no positives", "triplets", "quadruples", "masks")
    kind = draw(st.sampled_from(kinds[:3] if by_target else kinds))
    classes = draw(st.integers(1, 3))
    labels = torch.randint(0, classes, (n,), generator=generator, device="cpu")
    if kind == "labels":
        return labels, None
    if kind == "no positives":
        return torch.arange(n, device="cpu"), None
    if kind == "masks":
        same = labels[:, None] == labels[None, :]
        return None, (same, ~same)
    if kind == "callable":
        return torch.arange(n, device="cpu"), relate_by_remainder
    count = draw(st.integers(0, 12))
    width = 3 if kind == "triplets" else 4
    return None, tuple(torch.randint(0, n, (width, count), generator=generator, device="cpu"))


@st.composite
def network_cases(
    draw: st.DrawFn,
    max_points: int = 6,
    networks: Sequence[str] = tuple(NETWORKS),
    by_target: bool = False,
    min_points: int = 1,
) -> tuple[nn.Module, Tensor, Case]:
    """Draw a network, its inputs, and the pairs of its outputs; ``by_target``: only pairs that a loader can carry."""
    n, dim = draw(st.integers(min_points, max_points)), draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**16))
    torch.manual_seed(seed)
    kind = draw(st.sampled_from(networks))
    model = build_network(kind, dim)
    generator = torch.Generator().manual_seed(seed)
    x = make_inputs(kind, n, generator)
    labels, pairs = draw(pair_kinds(n, generator, by_target))
    return model, x, Case(model(x).detach(), labels, pairs, draw(options))


def truth_and_size(model: nn.Module, x: Tensor, case: Case) -> tuple[Tensor, float]:
    """Return the dense curvature (P, P) by the oracle, and the size of the terms that may cancel in it."""
    truth = dense_ggn(model, x, **case.all)
    listed = list_pairs(len(x), case.labels, case.pairs)
    weights = pair_weights(listed, case.options["negative_weight"], case.options["normalization"])
    total = 2 * sum(abs(weight) for weight in weights.values())
    size = total / float(case.z.norm(dim=1).min()) ** 2 * float(dense_jacobian(model, x).square().sum())
    return truth, 1e-3 * size
