"""What registration adds to BackPACK, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from backpack import backpack, extend
from backpack import extensions as host
from backpack.extensions.module_extension import ModuleExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from devices import DEVICES
from strategies import close
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature import register, unregister
from contrastive_curvature.hosts.backpack import BackPackPullback, DiagCurvature
from contrastive_curvature.losses import LogisticLoss
from contrastive_curvature.testing import dense_jacobian

pytestmark = pytest.mark.parametrize("device", DEVICES)

EXTENSIONS = {
    name: getattr(host, name)
    for name in (
        *("DiagGGNExact", "DiagGGNMC", "BatchDiagGGNExact", "BatchDiagGGNMC", "SqrtGGNExact", "SqrtGGNMC"),
        *("KFAC", "KFLR", "KFRA", "DiagHessian", "BatchDiagHessian", "GGNMP", "HMP", "PCHMP"),
    )
}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    was = "__call__" in vars(SecondOrderBackpropExtension)
    register()
    yield
    if was:
        register()
    else:
        unregister()


def ordinary_results(device: str) -> dict[str, Tensor]:
    """Numbers of a classifier, of every extension."""
    out = {}
    for name, made in EXTENSIONS.items():
        torch.manual_seed(0)
        model = extend(nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3)).to(device))
        x, y = torch.randn(6, 4, device=device), torch.arange(6, device=device) % 3
        with backpack(made()) as _:
            extend(nn.CrossEntropyLoss())(model(x), y).backward()
        field = made().savefield
        values = [getattr(p, field) for p in model.parameters()]
        values = [
            v(torch.ones(1, *p.shape, device=device)) if callable(v) else v
            for v, p in zip(values, model.parameters(), strict=True)
        ]
        out[name] = torch.cat([t.detach().flatten() for v in values for t in (v if isinstance(v, list) else [v])])
    return out


def test_ordinary_results_are_bit_identical(device: str) -> None:
    registered = ordinary_results(device)
    unregister()
    plain = ordinary_results(device)
    assert registered.keys() == plain.keys()
    assert all(torch.equal(registered[k], plain[k]) for k in plain)


def test_one_method_is_added_and_taken_back(device: str) -> None:
    unregister()
    before = dict(vars(SecondOrderBackpropExtension)), {made: dict(vars(made)) for made in EXTENSIONS.values()}
    register()
    register()
    assert vars(SecondOrderBackpropExtension).keys() - before[0].keys() == {"__call__"}
    unregister()
    unregister()
    after = dict(vars(SecondOrderBackpropExtension)), {made: dict(vars(made)) for made in EXTENSIONS.values()}
    assert after == before


def test_nothing_is_known_when_unregistered(device: str) -> None:
    unregister()
    model, loss_fn = extend(nn.Linear(4, 3).to(device)), extend(cc.ContrastiveLoss(pd_fix="psd"))
    x, labels = torch.randn(5, 4, device=device), torch.arange(5, device=device) % 2
    for known in (False, True):
        with backpack(host.DiagGGNExact()):
            if known:
                register()
                loss_fn(model(x), labels).backward()
            else:
                with pytest.raises(NotImplementedError, match="ContrastiveLoss"):
                    loss_fn(model(x), labels).backward()
    assert model.weight.diag_ggn_exact.shape == model.weight.shape


def test_somebody_elses_extension_is_taken(device: str) -> None:
    """For our loss and our normalisation, in an extension of the host's."""
    calls = []

    class Theirs(ModuleExtension):
        def __call__(self, *_: Any) -> None:
            calls.append(self)

    for kind in (cc.ContrastiveLoss, cc.L2Norm):
        made, theirs = host.DiagGGNExact(), Theirs()
        made.set_module_extension(kind, theirs)
        made(kind(), None, None)
        assert calls.pop() is theirs


def test_a_loss_that_was_written_later(device: str) -> None:
    """BackPACK looks up a module's own class."""

    class Mine(LogisticLoss):
        pass

    class Younger(Mine):
        pass

    x, labels = torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 2
    for kind in (LogisticLoss, Mine, Younger):
        torch.manual_seed(0)
        model, loss = nn.Linear(4, 3).double(), kind(scale=2.0, bias=-0.3, pd_fix="psd")
        jacobian, z = dense_jacobian(model, x), model(x).detach()
        truth = (jacobian.T @ loss.output_hessian(z, labels).dense() @ jacobian).diagonal()
        extend(model.to(device)), extend(loss)
        for made in (host.DiagGGNExact(), DiagCurvature()):
            with backpack(made):
                loss(model(x.to(device)), labels.to(device)).backward()
            found = torch.cat([getattr(p, made.savefield).flatten() for p in model.parameters()]).cpu()
            assert close(found, truth)


def test_our_extensions_need_no_registration(device: str) -> None:
    model, x = extend(nn.Linear(4, 3).to(device)), torch.randn(5, 4, device=device)
    loss_fn, labels = extend(cc.ContrastiveLoss()), torch.arange(5, device=device) % 2
    unregister()
    with backpack(DiagCurvature()):
        loss_fn(model(x), labels=labels).backward()
    assert model.weight.diag_curvature.shape == model.weight.shape


def test_the_pullback_needs_no_registration(device: str) -> None:
    model, x = nn.Linear(4, 3).to(device), torch.randn(5, 4, device=device)
    unregister()
    found = BackPackPullback(cc.network.encoder.Encoder(model, x)).vjp(x, torch.ones(5, 1, 3, device=device))
    assert torch.equal(found[:, 0, -3:], torch.ones(5, 3, device=device))
