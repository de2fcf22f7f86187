"""What the property tests draw; see :mod:`contrastive_curvature.testing.cases`."""

import torch
from hypothesis import strategies as st

from contrastive_curvature.testing.cases import (
    DISTANCES,
    FIXES,
    NORMALIZATIONS,
    Case,
    close,
    network_cases,
    options,
    pair_kinds,
    relate_by_remainder,
)
from contrastive_curvature.testing.networks import NETWORKS, build_network, make_inputs

__all__ = [
    "DISTANCES",
    "FIXES",
    "INPUTS",
    "NETWORKS",
    "NORMALIZATIONS",
    "Case",
    "build_network",
    "cases",
    "close",
    "make_inputs",
    "network_cases",
    "options",
    "pair_kinds",
    "relate_by_remainder",
]

INPUTS = 4


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
