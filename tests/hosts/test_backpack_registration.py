"""What registration adds to BackPACK, and that nothing else changes."""

from collections.abc import Iterator

import pytest
import torch
from backpack import backpack, extend
from backpack import extensions as host
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from strategies import close
from torch import nn

import contrastive_curvature as cc
from contrastive_curvature import register, unregister
from contrastive_curvature.hosts.backpack import BackPackPullback, DiagCurvature
from contrastive_curvature.losses import LogisticLoss
from contrastive_curvature.testing import dense_jacobian

EXTENSIONS = [kind for kind in vars(host).values() if isinstance(kind, type)]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    was = "__call__" in vars(SecondOrderBackpropExtension)
    register()
    yield
    if was:
        register()
    else:
        unregister()


def test_one_method_is_added_and_taken_back(device: str) -> None:
    unregister()
    before = dict(vars(SecondOrderBackpropExtension)), {made: dict(vars(made)) for made in EXTENSIONS}
    register()
    register()
    assert vars(SecondOrderBackpropExtension).keys() - before[0].keys() == {"__call__"}
    unregister()
    unregister()
    after = dict(vars(SecondOrderBackpropExtension)), {made: dict(vars(made)) for made in EXTENSIONS}
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


def test_a_loss_that_was_written_later(device: str) -> None:
    """BackPACK looks up a module's own class."""

    class Mine(LogisticLoss):
        pass

    x, labels = torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 2
    for kind in (LogisticLoss, Mine):
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


def test_our_extensions_and_the_pullback_need_no_registration(device: str) -> None:
    model, x = extend(nn.Linear(4, 3).to(device)), torch.randn(5, 4, device=device)
    unregister()
    with backpack(DiagCurvature()):
        extend(cc.ContrastiveLoss())(model(x), labels=torch.arange(5, device=device) % 2).backward()
    assert model.weight.diag_curvature.shape == model.weight.shape
    found = BackPackPullback(cc.network.encoder.Encoder(model, x)).vjp(x, torch.ones(5, 1, 3, device=device))
    assert torch.equal(found[:, 0, -3:], torch.ones(5, 3, device=device))
