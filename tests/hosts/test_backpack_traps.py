"""Encoders and losses that BackPACK would give another curvature of, without a word: each is exact or refused."""

from typing import Any
from unittest import mock

import pytest
import torch
from backpack import backpack, disable, extend
from backpack.context import CTX
from backpack.custom_module.branching import SumModule
from backpack_networks import build
from strategies import INPUTS, close
from tables import each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.hosts.backpack import BackPackPullback, CurvatureFactor, DiagCurvature, layers
from contrastive_curvature.laplace.backends.backpack import BackPackContrastiveGGN
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.testing import dense_ggn

LABELS = torch.tensor([0, 0, 1, 1, 1])


class Parts(nn.Module):
    """Two linear layers, something in place, and a function that says what to do with them."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(INPUTS, INPUTS), nn.ReLU(inplace=True), nn.Linear(INPUTS, 3)
        self.drop, self.flat, self.add = nn.Dropout(0.5, inplace=True), nn.Flatten(), SumModule()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class StraightThrough(torch.autograd.Function):
    """The gradient of the identity, with other values."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return torch.relu(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad


def data(device: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(len(LABELS), INPUTS, dtype=dtype, device=device)


def test_gradients_that_only_autograd_knows_are_refused(device: str) -> None:
    x = data(device)
    hooked = build("smooth", 3)
    hooked[1].register_forward_hook(lambda _, __, out: 2 * out)
    late = build("smooth", 3)
    late[2].register_forward_pre_hook(lambda _, args: (2 * args[0],))
    straight = Parts(lambda s, x: s.b(StraightThrough.apply(s.a(x))))
    for model, why in ((hooked, "other gradients"), (late, "no layer put out"), (straight, "no layer put out")):
        with pytest.raises(cc.UnsupportedError, match=why) as caught:
            BackPackPullback(Encoder(model.to(device).double().eval(), x)).forward(x)
        assert "ContrastiveGGN" in str(caught.value)


@each("kind", [BackPackContrastiveGGN, cc.ContrastiveGGN])
def test_an_extended_model_stays_as_it_was(kind: Any, device: str) -> None:
    """A backward pass is still to come, and its extensions find what they stored."""
    model, x, labels = build("smooth", 3).to(device), data(device), LABELS.to(device)
    truth = dense_ggn(model, x, labels, pd_fix="psd").diagonal()
    extend(model)
    value = extend(cc.ContrastiveLoss(pd_fix="psd"))(model(x), labels)
    state = torch.random.get_rng_state()
    handles = len(CTX.hook_handles)
    with backpack(DiagCurvature()):
        found = kind(model, pd_fix="psd").diag(x, labels)[1]
        kind(model, pd_fix="psd").kron(x, labels)
        assert torch.equal(state, torch.random.get_rng_state())
        assert not any(hasattr(p, "diag_curvature") for p in model.parameters())
        value.backward()
    assert len(CTX.hook_handles) == handles
    assert close(found, truth)
    assert close(torch.cat([p.diag_curvature.flatten() for p in model.parameters()]), truth)


def discarded(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    s.act(h)
    return s.b(h)


def changed(overwrite: Any) -> Any:
    def function(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        overwrite(s, h)
        return s.b(h)

    return function


def at_the_end(s: Any, x: Tensor) -> Tensor:
    h = s.b(x)
    s.act(h)
    return h


def beside(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    g = s.act(s.flat(s.drop(h)))
    return s.b(s.add(g, h))


IN_PLACE = {
    "module, result unused": discarded,
    "module, at the end": at_the_end,
    "module, behind a flattening": beside,
    "method": changed(lambda _, h: h.relu_()),
}


@each("name", IN_PLACE)
def test_overwriting_what_is_used_elsewhere_is_refused(name: str, device: str) -> None:
    model = Parts(IN_PLACE[name]).to(device).eval()
    # All positive: the values tell nothing.
    nn.init.constant_(model.a.bias, 100.0)
    nn.init.constant_(model.b.bias, 100.0)
    x = data(device, torch.float32)
    with pytest.raises(cc.UnsupportedError, match=r"overwrote|no layer put out") as caught:
        BackPackPullback(Encoder(model, x)).forward(x)
    assert "ContrastiveGGN" in str(caught.value)


def residual(s: Any, x: Tensor) -> Tensor:
    h = s.a(s.drop(x))
    return s.b(s.flat(s.act(s.add(h, x))))


def test_overwriting_ones_own_is_exact(device: str) -> None:
    model, x, labels = Parts(residual).to(device).double().eval(), data(device), LABELS.to(device)
    truth = dense_ggn(model, x, labels).diagonal()
    assert close(BackPackContrastiveGGN(model).diag(x, labels)[1], truth)


def test_a_wrong_rule_of_the_host_is_noticed(device: str) -> None:
    model, x = build("smooth", 3).to(device), data(device)
    owner = layers.known_layers()[nn.ELU].derivatives
    right = owner.jac_t_mat_prod
    pullback = BackPackPullback(Encoder(model, x))
    with (
        mock.patch.object(owner, "jac_t_mat_prod", lambda *args: 1.01 * right(*args)),
        pytest.raises(cc.UnsupportedError, match="other gradients"),
    ):
        pullback.forward(x)


def storing(s: Any, x: Tensor) -> Tensor:
    s.last = h = s.a(x)
    s.acts.append(h)
    return s.b(s.flat(h))


def test_nothing_is_left_in_the_users_model(device: str) -> None:
    model, x, labels = Parts(storing).to(device).double(), data(device), LABELS.to(device)
    model.acts = []
    model(x)  # with a graph, which cannot be copied
    count = len(model.acts)
    BackPackPullback(Encoder(model, x)).vjp(x, x.new_ones(5, 1, 3))
    assert all(type(h) is Tensor for h in (*model.acts, model.last))
    assert count < len(model.acts)
    assert close(BackPackContrastiveGGN(model).diag(x, labels)[1], dense_ggn(model, x, labels).diagonal())


class Residual(nn.Module):
    """Of modules only, as BackPACK needs it; the sum is a loss's input, and so is what goes into it."""

    def __init__(self) -> None:
        super().__init__()
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
    calls = (lambda z: loss_fn(z, labels), lambda z: loss_fn(z, labels=labels), lambda z: loss_fn(z, pairs=masks))
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
