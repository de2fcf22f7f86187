"""Encoders that compute in half precision under autocast: what they give is lifted, and curvatures are float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import DEVICES
from laplace import Laplace
from tables import covering
from torch import Tensor, nn

import contrastive_curvature  # noqa: F401  registers the likelihood

STRUCTURES: list[tuple[str, str, dict[str, Any]]] = [
    ("last_layer", "diag", {}),
    ("all", "diag", {}),
    ("all", "kron", {}),
    ("all", "full", {}),
]


class Autocast(nn.Module):
    """A model that computes in bfloat16, and gives float32 or not."""

    def __init__(self, net: nn.Module, lifts: bool) -> None:
        super().__init__()
        self.net, self.lifts = net, lifts

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            z = self.net(x)
        return z.float() if self.lifts else z


@pytest.mark.parametrize("device", DEVICES)
@covering(1, lifts=[True, False], weights__structure__more=STRUCTURES)
def test_posteriors_are_nearly_those_of_full_precision(
    weights: str, structure: str, more: dict[str, Any], lifts: bool, device: str
) -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(40, 6, device=device), (torch.arange(40) % 4).to(device)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
    kappa = []
    for model in (Autocast(net, lifts), net):
        la = Laplace(model, "contrastive", weights, structure, **more)
        la.fit([(x[:7], labels[:7]), (x[7:], labels[7:])])
        la.optimize_prior_precision()
        kappa.append(la(x[:8]).kappa)
        assert kappa[-1].dtype == torch.float32
        assert la(x[:4], pred_type="nn", n_samples=2).kappa.isfinite().all()
        with torch.autocast(device, dtype=torch.bfloat16):
            assert la(x[:2], joint=True).joint_covariance.dtype == torch.float32
    # bfloat16 has three digits, and Kronecker factors multiply what two of them lose.
    assert torch.allclose(*kappa, rtol=0.2 if structure == "kron" else 0.1)
