"""Every backend passes the same contract."""

from contrastive_curvature import ContrastiveGGN
from contrastive_curvature.testing import BackendContract


class TestTorchFunc(BackendContract):
    backend = ContrastiveGGN
