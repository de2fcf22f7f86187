"""What the property tests draw: points, pairs, options and small networks. Everything is float64 and seeded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

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
        return {"labels": self.labels, "pairs": self.pairs}

    @property
    def all(self) -> dict[str, Any]:
        return {**self.given, **self.options}

    def to(self, device: str) -> Case:
        pairs = self.pairs
        if isinstance(pairs, tuple):
            pairs = tuple(t.to(device) for t in pairs)
        labels = None if self.labels is None else self.labels.to(device)
        return Case(self.z.to(device), labels, pairs, self.options)


def close(a: Tensor, b: Tensor, scale: Tensor | float | None = None, tolerance: float = 1e-10) -> bool:
    """Largest error relative to the largest entry; ``scale`` when the truth may be a cancellation to zero."""
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
    """A symmetric relation with pairs that are neither."""
    gap = (a[:, None] - b[None, :]).abs() % 4
    return gap == 0, gap == 1


@st.composite
def pair_kinds(draw: st.DrawFn, n: int, generator: torch.Generator) -> tuple[Tensor | None, Any]:
    """Labels (from one class to all different), triplets and 4-tuples with repetitions, masks, or a callable."""
    kind = draw(st.sampled_from(("labels", "triplets", "quadruples", "masks", "callable", "no positives")))
    classes = draw(st.integers(1, 3))
    labels = torch.randint(0, classes, (n,), generator=generator)
    if kind == "labels":
        return labels, None
    if kind == "no positives":
        return torch.arange(n), None
    if kind == "masks":
        same = labels[:, None] == labels[None, :]
        return None, (same, ~same)
    if kind == "callable":
        return torch.arange(n), relate_by_remainder
    count = draw(st.integers(0, 12))
    width = 3 if kind == "triplets" else 4
    return None, tuple(torch.randint(0, n, (width, count), generator=generator))


@st.composite
def cases(draw: st.DrawFn, max_points: int = 7, max_dim: int = 4) -> Case:
    """Points near each other and far apart, of norms from 0.1 to 10, with pairs and options."""
    n, dim = draw(st.integers(1, max_points)), draw(st.integers(1, max_dim))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    spread = draw(st.sampled_from((0.1, 1.0)))
    centre = torch.randn(1, dim, generator=generator, dtype=torch.float64)
    z = centre + spread * torch.randn(n, dim, generator=generator, dtype=torch.float64)
    z = z * 10 ** (2 * torch.rand(n, 1, generator=generator, dtype=torch.float64) - 1)
    labels, pairs = draw(pair_kinds(n, generator))
    return Case(z, labels, pairs, draw(options))


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ELU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


INPUTS = 4


def build_network(kind: str, dim: int) -> nn.Module:
    """Small encoders from (N, 4) to (N, dim) raw outputs, in float64 and evaluation mode."""
    made = {
        "linear": lambda: nn.Linear(INPUTS, dim),
        "no bias": lambda: nn.Linear(INPUTS, dim, bias=False),
        "tanh": lambda: nn.Sequential(nn.Linear(INPUTS, 3), nn.Tanh(), nn.Linear(3, dim)),
        "relu": lambda: nn.Sequential(nn.Linear(INPUTS, 5), nn.ReLU(inplace=True), nn.Linear(5, dim)),
        "softplus": lambda: nn.Sequential(nn.Linear(INPUTS, 3), nn.Softplus(), nn.Linear(3, dim, bias=False)),
        "conv": lambda: nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 2, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(18, dim)
        ),
        "batchnorm": lambda: nn.Sequential(nn.Linear(INPUTS, 3), nn.BatchNorm1d(3), nn.SiLU(), nn.Linear(3, dim)),
        "layernorm": lambda: nn.Sequential(nn.Linear(INPUTS, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, dim)),
        "residual": lambda: nn.Sequential(Residual(INPUTS), nn.Linear(INPUTS, dim)),
    }[kind]()
    for module in made.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2)
    return made.double().eval()


NETWORKS = ("linear", "no bias", "tanh", "relu", "softplus", "conv", "batchnorm", "layernorm", "residual")


@st.composite
def network_cases(draw: st.DrawFn, max_points: int = 6) -> tuple[nn.Module, Tensor, Case]:
    """A network, its inputs, and the pairs of its outputs."""
    n, dim = draw(st.integers(1, max_points)), draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**16))
    torch.manual_seed(seed)
    model = build_network(draw(st.sampled_from(NETWORKS)), dim)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, INPUTS, generator=generator, dtype=torch.float64)
    labels, pairs = draw(pair_kinds(n, generator))
    return model, x, Case(model(x).detach(), labels, pairs, draw(options))
