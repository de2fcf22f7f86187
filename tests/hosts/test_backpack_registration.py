"""What registration adds to BackPACK, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from backpack import backpack, extend
from backpack import extensions as host
from backpack.extensions.module_extension import ModuleExtension
from devices import DEVICES
from strategies import close
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.hosts.backpack import BackPackPullback, DiagCurvature, register, registry, unregister
from contrastive_curvature.hosts.backpack.subclasses import known_losses
from contrastive_curvature.losses import LogisticLoss, PairLoss
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
    was = bool(registry._undo)
    register()
    yield
    if was:
        register()
    else:
        unregister()


def module_map(extension: Any) -> dict[type, Any]:
    return extension._BackpropExtension__module_extensions


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


def test_only_our_entries_are_added_and_undone(device: str) -> None:
    unregister()
    constructors = {made: made.__init__ for made in registry._HOSTS}
    ours = dict(vars(PairLoss)), dict(vars(cc.ContrastiveLoss)), dict(vars(cc.L2Norm))
    plain = {name: set(module_map(made())) for name, made in EXTENSIONS.items()}
    register()
    register()
    for name, made in EXTENSIONS.items():
        added = known_losses() if name == "PCHMP" else known_losses() | {cc.L2Norm}
        assert set(module_map(made())) - plain[name] == added
    unregister()
    unregister()
    assert all(made.__init__ is before for made, before in constructors.items())
    assert (dict(vars(PairLoss)), dict(vars(cc.ContrastiveLoss)), dict(vars(cc.L2Norm))) == ours
    assert all(set(module_map(made())) == plain[name] for name, made in EXTENSIONS.items())


def test_somebody_elses_extension_is_not_overwritten(device: str) -> None:
    class Theirs(ModuleExtension):
        pass

    unregister()
    original = host.secondorder.diag_ggn.DiagGGN.__init__

    def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.set_module_extension(cc.L2Norm, Theirs())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host.secondorder.diag_ggn.DiagGGN, "__init__", theirs)
        register()
        with pytest.raises(cc.UnsupportedError, match="Theirs already handles L2Norm") as caught:
            host.DiagGGNExact()
        assert "unregister()" in str(caught.value)
        host.SqrtGGNExact()
        unregister()
        assert isinstance(module_map(host.DiagGGNExact())[cc.L2Norm], Theirs)


def test_a_later_wrapper_stays_and_ours_goes_silent(device: str) -> None:
    ours = host.GGNMP.__init__
    calls = []

    def later(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        ours(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host.GGNMP, "__init__", later)
        unregister()
        assert cc.L2Norm not in module_map(host.GGNMP())
        assert calls == [1]
    host.GGNMP.__init__ = ours.__wrapped__


def test_a_loss_that_was_written_later(device: str) -> None:
    """BackPACK looks up a module's own class."""

    class Mine(LogisticLoss):
        pass

    class Younger(Mine):
        pass

    x, labels = torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 2
    for kind in (LogisticLoss, Mine, Younger):
        assert kind in known_losses()
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
