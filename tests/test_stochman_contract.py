"""The StochMan adapter keeps the contract of every backend."""

from __future__ import annotations

from contrastive_curvature.backends.stochman import StochManContrastiveGGN
from contrastive_curvature.testing import BackendContract


class TestStochMan(BackendContract):
    backend = StochManContrastiveGGN
    # The user's own modules, and layers that take tokens: StochMan knows neither.
    refused = frozenset({"residual", "attention", "embedding", "shared"})
