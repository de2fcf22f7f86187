"""What the property tests draw; see :mod:`contrastive_curvature.testing.cases`."""

from contrastive_curvature.testing.cases import (
    DISTANCES,
    FIXES,
    NORMALIZATIONS,
    Case,
    cases,
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
