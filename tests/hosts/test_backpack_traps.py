"""Encoders that BackPACK would give another curvature of, without a word: each is exact or refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from backpack import backpack, extend
from backpack_networks import build
from devices import DEVICES
from strategies import INPUTS, close
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.hosts.backpack import BackPackPullback, DiagCurvature, network
from contrastive_curvature.laplace.backends.backpack import BackPackContrastiveGGN
from contrastive_curvature.laplace.backends.choice import choose_backend
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.options import Structure
from contrastive_curvature.testing import dense_ggn

pytestmark = pytest.mark.parametrize("device", DEVICES)

LABELS = torch.tensor([0, 0, 1, 1, 1])


class Parts(nn.Module):
    """Two linear layers, something in place, and a function that says what to do with them."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(INPUTS, INPUTS), nn.ReLU(inplace=True), nn.Linear(INPUTS, 3)
        self.drop, self.flat = nn.Dropout(0.5, inplace=True), nn.Flatten()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class StraightThrough(torch.autograd.Function):
    """The gradient of the identity, with other values; a trace takes it for what it computes."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return torch.relu(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad


def without_gradient(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = torch.tanh(s.a(x))
    return s.b(h)


def data(device: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(len(LABELS), INPUTS, dtype=dtype, device=device)


GRADIENTS = {
    "no_grad": Parts(without_gradient),
    "straight through": Parts(lambda s, x: s.b(StraightThrough.apply(s.a(x)))),
}


def pull(model: nn.Module, x: Tensor, product_first: bool) -> Any:
    encoder = Encoder(model, x)
    made = BackPackPullback(encoder)
    return made.vjp(x, x.new_ones(len(x), 1, encoder.dim)) if product_first else made.forward(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("product_first", [True, False])
def test_gradients_that_only_autograd_knows_are_refused(dtype: torch.dtype, product_first: bool, device: str) -> None:
    x = data(device, dtype)
    detached = nn.Sequential(nn.Linear(INPUTS, 3), nn.Tanh(), nn.Linear(3, 2))
    detached[1].register_forward_hook(lambda _, __, out: out.detach())
    frozen_end = Parts(lambda s, x: s.b(torch.tanh(s.a(x))).detach())
    for model in (GRADIENTS["no_grad"], GRADIENTS["straight through"], detached, frozen_end):
        model = model.to(device, dtype).eval()
        with pytest.raises(cc.UnsupportedError, match=r"torch\.no_grad|cannot be traced|'detach'") as caught:
            pull(model, x, product_first)
        assert "ContrastiveGGN" in str(caught.value)


def test_the_default_backend_is_exact_for_them(device: str) -> None:
    x, labels = data(device), LABELS.to(device)
    model = GRADIENTS["no_grad"].to(device).double()
    made = choose_backend(model, x, Structure.DIAG, pd_fix="psd")
    assert type(made) is cc.ContrastiveGGN
    assert not made.diag(x, labels)[1][: INPUTS * (INPUTS + 1)].any()


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float64, 1 + 1e-6), (torch.float32, 1.0005)])
def test_small_changes_of_the_outputs_are_noticed(dtype: torch.dtype, scale: float, device: str) -> None:
    if device != "cpu" and dtype == torch.float32:
        pytest.skip("products may be rounded to TF32 there")
    model, x = build("relu", 3).to(device, dtype), data(device, dtype)
    model[0].register_forward_pre_hook(lambda _, args: (scale * args[0],))
    with pytest.raises(cc.UnsupportedError, match="other outputs"):
        BackPackPullback(Encoder(model, x)).forward(x)


def test_the_comparison_leaves_an_extended_model_as_it_was(device: str) -> None:
    """A backward pass is still to come, and its extensions find what they stored."""
    model, x, labels = build("smooth", 3).to(device), data(device), LABELS.to(device)
    truth = dense_ggn(model, x, labels, pd_fix="psd").diagonal()
    extend(model)
    value = extend(cc.ContrastiveLoss(pd_fix="psd"))(model(x), labels)
    state = torch.random.get_rng_state()
    with backpack(DiagCurvature()):
        BackPackPullback(Encoder(model, x)).forward(x)
        assert torch.equal(state, torch.random.get_rng_state())
        assert not any(hasattr(p, "diag_curvature") for p in model.parameters())
        value.backward()
    assert close(torch.cat([p.diag_curvature.flatten() for p in model.parameters()]), truth)


def discarded(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    s.act(h)
    return s.b(h)


def summed(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    g = torch.tanh(h)
    h += g
    return s.b(h + g)


def summed_alias(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    g = s.flat(s.drop(h))
    g += torch.tanh(x)
    return s.b(h)


def shared_by(overwrite: Any) -> Any:
    def function(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        g = overwrite(s, h)
        return s.b(torch.tanh(g) + h)

    return function


IN_PLACE = {
    "module": shared_by(lambda s, h: s.act(h)),
    "function": shared_by(lambda _, h: nn.functional.relu(h, inplace=True)),
    "position": shared_by(lambda _, h: nn.functional.relu(h, True)),
    "method": shared_by(lambda _, h: h.relu_()),
    "add_": shared_by(lambda _, h: h.add_(torch.relu(h))),
    "behind a flattening": shared_by(lambda s, h: s.act(torch.flatten(s.drop(h), 1))),
    "unused": discarded,
    "+=": summed,
    "+= to an alias": summed_alias,
    "input": lambda s, x: s.b(s.act(s.drop(x))),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_overwriting_what_is_used_elsewhere_is_refused(name: str, device: str) -> None:
    model = Parts(IN_PLACE[name]).to(device).eval()
    nn.init.constant_(model.a.bias, 100.0)  # all positive: the values tell nothing
    x = data(device, torch.float32)
    with pytest.raises(cc.UnsupportedError, match="works in place on") as caught:
        BackPackPullback(Encoder(model, x))
    assert "ContrastiveGGN" in str(caught.value)


def residual(s: Any, x: Tensor) -> Tensor:
    h = s.a(s.drop(x))
    h += x
    return s.b(s.flat(s.act(h)))


def test_overwriting_ones_own_is_exact(device: str) -> None:
    model, x, labels = Parts(residual).to(device).double().eval(), data(device), LABELS.to(device)
    truth = dense_ggn(model, x, labels).diagonal()
    assert close(BackPackContrastiveGGN(model).diag(x, labels)[1], truth)


def test_limits_of_the_host_show_when_the_backend_is_chosen(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = build("smooth", 3).to(device), data(device)

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a limit\nof the host")

    for name in ("run", "layers"):
        with monkeypatch.context() as patch, caplog.at_level(logging.INFO, logger="contrastive_curvature"):
            patch.setattr(network.Network, name, fails)
            with pytest.raises(cc.UnsupportedError, match=r"\(a limit\).*ContrastiveGGN"):
                BackPackPullback(Encoder(model, x)).forward(x)
            caplog.clear()
            assert type(choose_backend(model, x, Structure.DIAG)) is cc.ContrastiveGGN
            assert "a limit" in caplog.messages[0]
            assert "\n" not in caplog.messages[0]
    with monkeypatch.context() as patch:
        patch.setattr(BackPackPullback, "vjp", lambda *_: fails())
        assert type(choose_backend(model, x, Structure.DIAG)) is cc.ContrastiveGGN
    assert type(choose_backend(model, x, Structure.DIAG)) is BackPackContrastiveGGN


def test_settings_and_arguments_that_would_be_dropped(device: str) -> None:
    x = data(device, torch.float32)
    up = nn.ConvTranspose1d(1, 1, 3, stride=2, output_padding=1)
    model = nn.Sequential(nn.Unflatten(1, (1, INPUTS)), up, nn.Flatten()).to(device)
    with pytest.raises(cc.UnsupportedError, match=r"output_padding=\(1,\).*ContrastiveGGN"):
        BackPackPullback(Encoder(model, x))
    model[1] = Parts(lambda s, x: s.up(x, output_size=[10]))
    model[1].up = nn.ConvTranspose1d(1, 1, 3, stride=2)
    model.to(device)
    with pytest.raises(cc.UnsupportedError, match=r"'1\.up', a ConvTranspose1d: it takes more than one input"):
        BackPackPullback(Encoder(model, x))


def storing(s: Any, x: Tensor) -> Tensor:
    s.last = h = s.a(x)
    s.acts.append(h)
    return s.b(torch.tanh(h))


def test_a_trace_leaves_nothing_in_the_users_model(device: str) -> None:
    model, x, labels = Parts(storing).to(device).double(), data(device), LABELS.to(device)
    model.acts = []
    model(x)  # with a graph, which cannot be copied
    BackPackPullback(Encoder(model, x))
    assert all(type(h) is Tensor for h in (*model.acts, model.last))
    assert close(BackPackContrastiveGGN(model).diag(x, labels)[1], dense_ggn(model, x, labels).diagonal())
    model.file = (i for i in ())
    with pytest.raises(cc.UnsupportedError, match=r"cannot be copied.*ContrastiveGGN"):
        BackPackPullback(Encoder(model, x))
    outer = Parts(lambda s, x: s.b(torch.tanh(inner(x))))
    outer.inner = inner = Parts(lambda s, x: s.a(x))
    outer = outer.to(device).double()
    assert close(BackPackContrastiveGGN(outer).diag(x, labels)[1], dense_ggn(outer, x, labels).diagonal())
    held = [inner]
    outer.function = lambda s, x: s.b(torch.tanh(held[0](x)))
    with pytest.raises(cc.UnsupportedError, match="reference"):
        BackPackPullback(Encoder(outer, x))
