"""The encoders of the benchmarks (paper, G.2), by name."""

from __future__ import annotations

from benchmarks.experiments.networks.make import NETWORKS, GeM, make_network

__all__ = ["NETWORKS", "GeM", "make_network"]
