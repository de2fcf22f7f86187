"""Losses in our own extensions: their sum, their scale, and whose labels they take."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from backpack import backpack, disable, extend
from strategies import INPUTS, close
from tables import each
from test_backpack_traps import LABELS, data
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature import register
from contrastive_curvature.hosts.backpack import CurvatureFactor, DiagCurvature
from contrastive_curvature.testing import dense_ggn


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register()
    yield
    register()


class Residual(nn.Module):
    """Of modules only, as BackPACK needs it; the sum is a loss's input, and so is what goes into it."""

    def __init__(self) -> None:
        super().__init__()
        from backpack.custom_module.branching import SumModule

        self.first, self.inner, self.act, self.add = nn.Linear(INPUTS, 3), nn.Linear(3, 3), nn.Tanh(), SumModule()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        inner = self.act(self.inner(h))
        return self.add(h, inner), inner


def stacked(model: nn.Module) -> Tensor:
    """The curvature that the factors give."""
    factors = [p.curvature_factor for p in model.parameters()]
    whole = torch.cat([f.columns.flatten(1) for f in factors], dim=1)
    return whole.T @ torch.diag(factors[0].signs) @ whole


@each("fixes, where", [(("psd", "fixed"), (0, 0)), (("full", "full"), (0, 1)), (("psd", "full"), (1, 0))])
def test_several_losses_add_up(fixes: tuple[str, str], where: tuple[int, int], device: str) -> None:
    """On the same outputs, and at two ends of a branch, whose two sides belong to one of the losses."""
    model, x, labels = Residual().to(device).double(), data(device), LABELS.to(device)
    others = torch.tensor([0, 1, 0, 1, 0], device=device)
    scales = (3.0, -0.5)

    def one(end: int) -> nn.Module:
        return type("One", (nn.Module,), {"forward": lambda s, x: s.model(x)[end]})()

    truth = torch.zeros((), dtype=torch.float64, device=device)
    for end, fix, scale, y in zip(where, fixes, scales, (labels, others), strict=True):
        wrapped = one(end)
        wrapped.model = model
        truth = truth + scale * dense_ggn(wrapped, x, y, pd_fix=fix, margin=None)
    for module in model.children():
        extend(module)
    losses = [extend(cc.ContrastiveLoss(None, pd_fix=fix)) for fix in fixes]
    with backpack(DiagCurvature(), CurvatureFactor()):
        ends = model(x)
        first, second = (f(ends[end], y) for f, end, y in zip(losses, where, (labels, others), strict=True))
        (scales[0] * first + scales[1] * second).backward()
    found = torch.cat([p.diag_curvature.flatten() for p in model.parameters()])
    assert close(found, truth.diagonal())
    assert close(stacked(model), truth)


def diagonal(model: nn.Module) -> Tensor:
    return torch.cat([p.diag_curvature.flatten() for p in model.parameters()])


def test_labels_are_those_of_the_inputs(device: str) -> None:
    model, x, labels = extend(nn.Linear(INPUTS, 3).to(device).double()), data(device), LABELS.to(device)
    others = torch.tensor([0, 1, 0, 1, 0], device=device)
    truth = dense_ggn(model, x, labels, margin=None).diagonal()
    loss_fn = extend(cc.ContrastiveLoss(None))

    def evaluate(context: Any) -> None:
        with context:
            loss_fn(model(x).detach(), labels=others)

    masks = (labels[:, None] == labels, labels[:, None] != labels)
    calls = (
        lambda z: loss_fn(z, labels),
        lambda z: loss_fn(z, labels=labels),
        lambda z: loss_fn(z, pairs=masks),
    )
    for call in calls:
        for context in (disable(), torch.no_grad()):
            with backpack(DiagCurvature()):
                value = call(model(x))
                evaluate(context)
                value.backward()
            assert close(diagonal(model), truth)
    # What a call without a backward pass left is not that of the next call.
    loss_fn(model(x), others)
    with backpack(DiagCurvature()):
        loss_fn(model(x), labels=labels).backward()
    assert close(diagonal(model), truth)


def test_labels_of_another_call_are_not_taken(device: str) -> None:
    model, x, labels = extend(nn.Linear(INPUTS, 3).to(device).double()), data(device), LABELS.to(device)
    loss_fn, others = extend(cc.ContrastiveLoss(None)), torch.arange(5, device=device) % 2
    value = loss_fn(model(x), labels=labels)
    with disable():
        # BackPACK does not see this one, and keeps what the first was given.
        loss_fn(model(x), labels=others)
    with pytest.raises(cc.UnsupportedError, match=r"called again before backward\(\)"), backpack(DiagCurvature()):
        value.backward()


def test_dropout_in_training_mode_is_refused(device: str) -> None:
    x, labels = data(device), LABELS.to(device)
    model = extend(nn.Sequential(nn.Linear(INPUTS, 3), nn.Dropout(0.5), nn.Linear(3, 2)).to(device).double().train())
    loss_fn = extend(cc.ContrastiveLoss())
    with pytest.raises(cc.UnsupportedError, match=r"Dropout.*eval\(\)"), backpack(DiagCurvature()):
        loss_fn(model(x), labels).backward()
    model[1].p = 0.0
    with backpack(DiagCurvature()):
        loss_fn(model(x), labels).backward()
    assert close(diagonal(model), dense_ggn(model, x, labels).diagonal())
