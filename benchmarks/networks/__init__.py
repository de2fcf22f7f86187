"""The encoders of the benchmarks (paper, G.2), by name."""

from __future__ import annotations

from benchmarks.networks.gem import GeM
from benchmarks.networks.make import NETWORKS, make_network

__all__ = ["NETWORKS", "GeM", "make_network"]
