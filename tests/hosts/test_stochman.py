"""StochMan as a backend: conversion, and the adapter against the oracle."""

from typing import Any

import pytest
import torch
from backpack_networks import Drawn, hosted_cases
from hypothesis import given
from hypothesis import strategies as st
from stochman import nnj
from strategies import Case, close
from tables import each
from test_stochman_rules import scatter_statistics
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.errors import UnsupportedError
from contrastive_curvature.hosts.stochman import to_nnj
from contrastive_curvature.laplace.backends.stochman import StochManContrastiveGGN
from contrastive_curvature.network import pullback as limits
from contrastive_curvature.testing import dense_ggn, dense_jacobian

NETWORKS = {
    "in-place relu": lambda d: nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(inplace=True), nn.Linear(5, d)),
    "conv": lambda d: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 2, padding=1, bias=False), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(2, d),
    ),
    "biased conv": lambda d: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 2, bias=False), nn.Flatten(), nn.Linear(2, d)
    ),
    "conv1d": lambda d: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(3, d)),
    "norms": lambda d: nn.Sequential(
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), nn.Sigmoid(), nn.Dropout(0.3), nn.Identity(), nn.Linear(3, d)
    ),
    "frozen": lambda d: freeze(nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, d))),
    "tied": lambda d: tie(d),
    "host": lambda d: nnj.Sequential(nnj.Linear(4, 3), nnj.Tanh(), nnj.Reshape(3), nnj.Linear(3, d)),
}  # fmt: skip


def freeze(model: nn.Sequential) -> nn.Module:
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def tie(dim: int) -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, dim))


def build(kind: str, dim: int) -> nn.Module:
    model = NETWORKS[kind](dim).double()
    scatter_statistics(model)
    return model.eval()


def labelled(case: Case, n: int) -> Tensor:
    return torch.arange(n) % 3 if case.labels is None else case.labels


@given(drawn=hosted_cases(NETWORKS, build), elements=st.sampled_from((2**25, 40)))
def test_diag_and_full_are_exact(drawn: Drawn, elements: int, device: str) -> None:
    model, x, case = drawn
    labels = labelled(case, len(x))
    # A mean over pairs is scaled by the host's contract, so that it grows with the data.
    scale = len(x) / 2 if case.options["normalization"] == "type" else 1.0
    truth = scale * dense_ggn(model, x, labels, **case.options)
    y = cc.output_hessian(case.z, labels, **case.options).derivatives.dense()[0].abs().sum()
    size = 1e-3 * float(y / case.z.norm(dim=1).min() ** 2 * dense_jacobian(model, x).square().sum())
    backend = StochManContrastiveGGN(model.to(device), **case.options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "JACOBIAN_ELEMENTS", elements)
        found, full = backend.diag(x.to(device), labels)[1], backend.full(x.to(device), labels)[1]
    assert not found.requires_grad
    assert not full.requires_grad
    assert close(found.cpu(), truth.diagonal(), size)
    assert close(full.cpu(), truth, size)


def test_conversion_shares_parameters_and_leaves_the_model_alone(device: str) -> None:
    torch.manual_seed(0)
    for kind in NETWORKS:
        model = build(kind, 2).to(device).train()
        x = torch.randn(4, 4, dtype=torch.float64, device=device)
        made = to_nnj(model)
        assert [id(p) for p in made.parameters()] == [id(p) for p in model.parameters()]
        assert all(m.training for m in model.modules())
        assert close(made(x).detach(), model.eval()(x).detach())
        keys = [(set(vars(m)), vars(m).get("inplace"), len(m._forward_hooks)) for m in model.modules()]
        StochManContrastiveGGN(model).diag(x, torch.tensor([0, 0, 1, 1]))
        assert keys == [(set(vars(m)), vars(m).get("inplace"), len(m._forward_hooks)) for m in model.modules()]
        assert all(p.grad is None for p in model.parameters())
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        assert close(made(x).detach(), model(x).detach())


def hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda *_: None)
    return nn.Sequential(nn.Tanh(), layer)


REFUSED: dict[str, tuple[Any, str]] = {
    "own linear": (lambda: type("Shifted", (nn.Linear,), {})(4, 4), "'model' \\(Shifted\\)"),
    "gelu": (lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.GELU())), "'0.1' \\(GELU\\) has no counterpart"),
    "hook": (hooked, "forward hook"),
    "batch statistics": (lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), "track_running_stats"),
    "batch axis": (lambda: nn.Sequential(nn.Flatten(0)), "'0' \\(Flatten\\) has no counterpart there with these axes"),
    "unknown axis": (lambda: nn.Unflatten(1, (2, -1)), "'model' \\(Unflatten\\) has no counterpart"),
    "indices": (lambda: nn.Sequential(nn.MaxPool2d(2, return_indices=True)), "return_indices"),
}


@each("kind", REFUSED)
def test_refuses_by_layer_and_names_the_alternative(kind: str, device: str) -> None:
    make, named = REFUSED[kind]
    with pytest.raises(UnsupportedError, match=named + ".*Use backend=ContrastiveGGN \\(torch.func\\)"):
        to_nnj(make().to(device))
