"""Weights in another memory format give the same posterior."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES
from laplace import Laplace
from torch import nn

import contrastive_curvature as cc


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_channels_last(device, structure):
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(8, 3)).double()
    x, labels = torch.randn(12, 2, 4, 4, dtype=torch.float64, device=device), torch.arange(12, device=device) % 3
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        encoder.to(device, memory_format=memory_format)
        la = Laplace(encoder, likelihood="contrastive", subset_of_weights="all", hessian_structure=structure)
        la.fit([(x.contiguous(memory_format=memory_format), labels)])
        drawn = la.predictive_samples(x, n_samples=3, joint=True, generator=torch.Generator(device).manual_seed(0))
        nets = la(x, pred_type="nn", n_samples=3, generator=torch.Generator(device).manual_seed(0)).raw_mean
        found.append((la.mean, la(x).covariance, drawn, nets, la.log_marginal_likelihood()))
        online = cc.OnlineLaplace(encoder, probe=x, n_data=12, subset_of_weights="all", hessian_structure=structure)
        torch.manual_seed(1)
        online(x, labels)
        found[-1] += (online(x, labels).detach(), online.laplace()(x).covariance)
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
