"""Encoders and losses that BackPACK would give another curvature of, without a word: each is exact or refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from backpack import backpack, disable, extend
from backpack_networks import Branched, build
from devices import DEVICES
from strategies import INPUTS, close
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.backends.backpack import (
    BackPackContrastiveGGN,
    BackPackPullback,
    CurvatureFactor,
    DiagCurvature,
    network,
    register,
    unregister,
)
from contrastive_curvature.backends.choice import choose_backend
from contrastive_curvature.encoder import Encoder
from contrastive_curvature.options import Structure
from contrastive_curvature.testing import dense_ggn

pytestmark = pytest.mark.parametrize("device", DEVICES)

LABELS = torch.tensor([0, 0, 1, 1, 1])


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register()
    yield
    register()


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


def test_nothing_to_train(device: str) -> None:
    model = build("smooth", 3).to(device).requires_grad_(False)
    with pytest.raises(cc.InputError, match="at least one parameter that requires a gradient"):
        BackPackContrastiveGGN(model).diag(data(device), LABELS.to(device))


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
    with pytest.raises(cc.UnsupportedError, match="reference"):
        BackPackPullback(Encoder(outer.to(device).double(), x))


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


@pytest.mark.parametrize("fixes", [("psd", "fixed"), ("full", "full"), ("psd", "full")])
@pytest.mark.parametrize("where", [(0, 0), (0, 1), (1, 0)])
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

    for call in (lambda z: loss_fn(z, labels), lambda z: loss_fn(z, labels=labels)):
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


def test_labels_do_not_outlive_the_registration(device: str) -> None:
    model, x, labels = extend(nn.Linear(INPUTS, 3).to(device).double()), data(device), LABELS.to(device)
    loss_fn, z = extend(cc.ContrastiveLoss(None)), model(x)
    with disable():
        loss_fn(z, labels=1 - labels.clamp(max=1))
    loss_fn(z, labels=1 - labels.clamp(max=1)).detach()
    unregister()
    with pytest.raises(cc.UnsupportedError, match=r"register\(\)"), backpack(DiagCurvature()):
        loss_fn(z, labels=labels).backward()
    with backpack(DiagCurvature()):
        loss_fn(model(x), labels).backward()
    assert close(diagonal(model), dense_ggn(model, x, labels, margin=None).diagonal())


@pytest.mark.parametrize("scale", [5.0, -2.0, 0.0])
def test_scale_of_the_loss(scale: float, device: str) -> None:
    model, x, labels = extend(build("smooth", 3).to(device)), data(device), LABELS.to(device)
    truth = scale * dense_ggn(model, x, labels)
    with backpack(DiagCurvature(), CurvatureFactor()):
        (scale * extend(cc.ContrastiveLoss())(model(x), labels)).backward()
    assert close(diagonal(model), truth.diagonal())
    assert close(stacked(model), truth)


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


def test_functions_and_sums_are_still_exact(device: str) -> None:
    model, x, labels = nn.Sequential(Branched(), nn.Linear(3, 2)).to(device).double(), data(device), LABELS.to(device)
    assert close(BackPackContrastiveGGN(model).diag(x, labels)[1], dense_ggn(model, x, labels).diagonal())
