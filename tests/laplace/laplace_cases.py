"""A small encoder, its data, and its posterior of every kind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn

import contrastive_curvature as cc

__all__ = ["INDICES", "data", "encoder", "fitted", "make", "refused"]

INDICES = torch.tensor([0, 3, 26, 30, 41])
"""The subnetwork, of 43 parameters."""


def encoder(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return x.to(dtype), torch.arange(12) % 3


def make(
    weights: str = "last_layer", structure: str = "diag", dtype: torch.dtype = torch.float64, **options: Any
) -> Any:
    if weights == "subnetwork":
        options.setdefault("subnetwork_indices", INDICES)
    if structure == "gp":
        options.setdefault("n_subset", 4)
    kwargs = {"margin": 1.2, "pd_fix": "psd"}
    return Laplace(encoder(dtype), "contrastive", weights, structure, backend_kwargs=kwargs, **options)


def fitted(
    weights: str = "last_layer", structure: str = "diag", dtype: torch.dtype = torch.float64, **options: Any
) -> Any:
    la = make(weights, structure, dtype, **options)
    x, y = data(dtype)
    la.fit([(x[:6], y[:6]), (x[6:], y[6:])])
    return la


def refused(call: Callable[[], Any], *words: str, kind: type[Exception] = cc.InputError) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, cc.ContrastiveCurvatureError)
    assert all(word in str(caught.value) for word in words), str(caught.value)
