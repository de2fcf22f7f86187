"""Tests for backends and losses, ours or yours: the oracle, small networks, and the contract.

``check_loss(MyLoss())`` tests your own loss (needs pytest and Hypothesis, extra ``test``).

To test your own adapter, inherit from :class:`BackendContract` (needs pytest and Hypothesis, extra ``test``)::

    from contrastive_curvature.testing import BackendContract


    class TestMyBackend(BackendContract):
        backend = MyBackend
"""

import importlib
from typing import TYPE_CHECKING, Any

from contrastive_curvature.testing.networks import NETWORKS, build_network, make_inputs
from contrastive_curvature.testing.oracle import (
    dense_ggn,
    dense_jacobian,
    dense_output_hessian,
    list_pairs,
    pair_loss,
    pair_weights,
)

if TYPE_CHECKING:
    from contrastive_curvature.testing.contract import BackendContract
    from contrastive_curvature.testing.losses import check_loss

__all__ = [
    "NETWORKS",
    "BackendContract",
    "build_network",
    "check_loss",
    "dense_ggn",
    "dense_jacobian",
    "dense_output_hessian",
    "list_pairs",
    "make_inputs",
    "pair_loss",
    "pair_weights",
]


def __getattr__(name: str) -> Any:
    # The oracle needs neither pytest nor Hypothesis.
    modules = {"BackendContract": "contract", "check_loss": "losses"}
    if name in modules:
        return getattr(importlib.import_module(f"{__name__}.{modules[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
