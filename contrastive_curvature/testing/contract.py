"""The contract of a backend, as a test class to inherit.

Property-based: Hypothesis draws the network, the points, the pairs and the options; float64 and float32, on every
device there is.
"""

from __future__ import annotations

import pytest
import torch

from contrastive_curvature.testing.contract_base import make_backend
from contrastive_curvature.testing.contract_conduct import ConductContract
from contrastive_curvature.testing.contract_exact import ExactnessContract
from contrastive_curvature.testing.contract_losses import LossContract
from contrastive_curvature.testing.contract_single import SinglePrecisionContract

__all__ = ["DEVICES", "BackendContract", "make_backend"]

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
"""The devices that tests run on."""


@pytest.mark.parametrize("device", DEVICES)
class BackendContract(ExactnessContract, SinglePrecisionContract, ConductContract, LossContract):
    """Inherit, name the backend, and say which networks it refuses.

    Attributes:
        backend: The backend's class.
        refused: Kinds of networks (:data:`~contrastive_curvature.testing.NETWORKS`) that it refuses with an
            ``UnsupportedError`` that names ``ContrastiveGGN``.
        refused_kron: Further kinds for which it has no Kronecker factors of all parameters.
        options: Backend options of its own.
    """
