"""A user's own loop around the online Laplace: accumulated gradients and automatic mixed precision."""

from __future__ import annotations

import copy

import pytest
import torch
from devices import DEVICES
from strategies import close
from test_online_modes import STRUCTURES, SUBSETS, data, noisy_encoder
from torch import nn

from contrastive_curvature.online import OnlineLaplace

pytestmark = pytest.mark.parametrize("device", DEVICES)


def test_accumulated_gradients(device: str) -> None:
    x, labels = data(device)
    online = OnlineLaplace(noisy_encoder(device).eval(), probe=x, n_data=24, prior_precision=1e30)
    for rows in (slice(0, 6), slice(6, 12)):
        (online(x[rows], labels[rows]) / 2).backward()
    assert float(online.discounted.points) == pytest.approx(6 + 6 * (1 - 1e-4))
    found = [p.grad.clone() for p in online.parameters()]
    online.zero_grad()
    online.eval()
    torch.stack([online(x[rows], labels[rows]) for rows in (slice(0, 6), slice(6, 12))]).mean().backward()
    online.train()
    for a, p in zip(found, online.parameters(), strict=True):
        assert torch.allclose(a, p.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_autocast_touches_the_network_alone(subset: str, structure: str, device: str) -> None:
    x, labels = data(device)
    x, encoder = x.float(), noisy_encoder(device).float()[:1].append(nn.Tanh()).append(nn.Linear(6, 3)).to(device)
    how = {"probe": x, "n_data": 30, "subset_of_weights": subset, "hessian_structure": structure}
    low, high = OnlineLaplace(copy.deepcopy(encoder), **how), OnlineLaplace(encoder, **how)
    for _ in range(2):
        torch.manual_seed(3)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = low(x, labels)
        loss.backward()
        torch.manual_seed(3)
        truth = high(x, labels)
    assert torch.allclose(loss, truth, rtol=0.05)
    assert all(b.dtype != torch.bfloat16 for b in low.buffers())
    # Where the curvature takes a pass of its own, it is that of full precision; the last layer takes what there is.
    tolerance = 1e-3 if subset == "all" else 0.05
    for name, value in high.discounted.named_buffers():
        if name.startswith("curvature_"):
            assert close(getattr(low.discounted, name), value, tolerance=tolerance)
    optimizer = torch.optim.SGD(low.parameters(), lr=0.1)
    optimizer.step()
    assert torch.isfinite(low.laplace()(x).kappa).all()
