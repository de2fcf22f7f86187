"""Encoders that BackPACK would give another curvature of, without a word: each is exact or refused."""

from typing import Any
from unittest import mock

import pytest
import torch
from backpack import backpack, extend
from backpack.context import CTX
from backpack.custom_module.branching import SumModule
from backpack_networks import build
from strategies import INPUTS, close
from tables import each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.hosts.backpack import BackPackPullback, DiagCurvature, layers
from contrastive_curvature.laplace.backends.backpack import BackPackContrastiveGGN
from contrastive_curvature.laplace.backends.curvlinops import CurvlinopsContrastiveGGN
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


@each("kind", [BackPackContrastiveGGN, cc.ContrastiveGGN, CurvlinopsContrastiveGGN])
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
