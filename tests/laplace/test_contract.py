"""Every backend passes the same contract."""

from contrastive_curvature import (
    BackPackContrastiveGGN,
    ContrastiveGGN,
    CurvlinopsContrastiveGGN,
    StochManContrastiveGGN,
)
from contrastive_curvature.testing import BackendContract


class TestTorchFunc(BackendContract):
    backend = ContrastiveGGN


class TestBackPack(BackendContract):
    backend = BackPackContrastiveGGN
    refused = frozenset({"softplus", "gelu", "layernorm", "attention", "shared", "residual"})


class TestStochMan(BackendContract):
    backend = StochManContrastiveGGN
    refused = frozenset({"gelu", "layernorm", "attention", "shared", "residual", "embedding"})


class TestCurvlinops(BackendContract):
    backend = CurvlinopsContrastiveGGN
