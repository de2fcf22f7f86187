"""Traps of differentiating a user's module: ties, names, forward mode, and what autograd is told not to see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import DEVICES
from laplace import Laplace
from strategies import close
from tables import each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.network.module import ModulePullback
from contrastive_curvature.testing import dense_ggn, dense_jacobian

pytestmark = pytest.mark.parametrize("device", DEVICES)

LABELS = torch.tensor([0, 0, 1, 1, 2, 2])
OPTIONS: dict[str, Any] = {"pd_fix": "psd", "margin": None}


class Aliased(nn.Module):
    """Modules that have two names, and a parameter that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.tied, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.tied.weight = self.body.weight
        self.layers = nn.ModuleList([self.body, self.head])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.tied(torch.tanh(self.body(x)))))
        return out


class Frozen(nn.Module):
    """A part of the forward pass that autograd does not see, its parameters trainable all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = torch.tanh(self.body(x))
        out: Tensor = self.head(hidden)
        return out


class OldStyle(torch.autograd.Function):
    """Without a rule for functorch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * g


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return OldStyle.apply(x)


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    x, shared = torch.randn(6, 4, dtype=torch.float64), nn.Linear(4, 4)
    tokens = torch.tensor([[0, 1, 2], [3, 0, 0], [1, 1, 4], [2, 2, 2], [4, 0, 3], [0, 4, 1]])
    return {
        "aliased": (Aliased().double(), x),
        "twice": (nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(4, 3)).double(), x),
        "no_grad": (Frozen().double(), x),
        "padding": (nn.Sequential(nn.Embedding(5, 2, padding_idx=0), nn.Flatten(), nn.Linear(6, 3)).double(), tokens),
        "old function": (nn.Sequential(nn.Linear(4, 4), Square(), nn.Linear(4, 3)).double(), x),
        "weight norm": (
            nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))).double(),
            x,
        ),
    }


@each("kind", list(networks()))
@pytest.mark.filterwarnings(
    "ignore:.*are taken point by point", "ignore:There is a performance drop", "ignore:no gradient"
)
def test_exact_in_every_way_and_the_model_untouched(kind: str, device: str) -> None:
    model, x = networks()[kind]
    truth, jacobian = dense_ggn(model, x, LABELS, **OPTIONS), dense_jacobian(model, x)
    model, x = model.to(device), x.to(device)
    identities = [(name, id(p), type(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    size = float(truth.abs().max())
    assert close(cc.ggn(model, x, LABELS, clamp=False, **OPTIONS).cpu(), truth.diagonal(), size)
    assert close(cc.ggn(model, x, LABELS, clamp=False, structure="full", **OPTIONS).cpu(), truth, size)
    v = torch.linspace(-1, 1, len(truth), dtype=torch.float64, device=device)
    loader = [(x[:4], LABELS[:4]), (x[4:], LABELS[4:])]
    operator = cc.ContrastiveGGNLinearOperator(model, cc.ContrastiveLoss(None, pd_fix="psd"), None, loader)
    assert close((operator @ torch.eye(len(truth), dtype=torch.float64, device=device)).cpu(), truth, size)
    pullback = ModulePullback(cc.network.encoder.Encoder(model.eval(), x))
    with torch.no_grad():
        z, moved = pullback.jvp(x, v)
    assert close(moved.cpu().flatten(), jacobian @ v.cpu(), float(jacobian.abs().max()))
    assert not z.requires_grad
    la = Laplace(model, "contrastive", "all", "full", backend_kwargs=OPTIONS)
    la.fit(loader)
    assert bool(torch.isfinite(la.predictive_samples(x, n_samples=2, joint=True)).all())
    default = Laplace(model, "contrastive", "all", "diag", backend_kwargs=OPTIONS)
    default.fit(loader)
    assert close(default.H.cpu(), truth.diagonal(), size)
    assert [(name, id(p), type(p)) for name, p in model.named_parameters(remove_duplicate=False)] == identities
