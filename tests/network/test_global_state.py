"""What belongs to the whole process stays as it is while the library works: seen from inside, and by another thread."""

from __future__ import annotations

import builtins
import os
import random
import threading
import warnings
from collections.abc import Callable
from math import sqrt
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from backpack import disable
from laplace import Laplace
from tables import covering, each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.hosts.backpack import BackPackPullback
from contrastive_curvature.hosts.curvlinops import ContrastiveGGNLinearOperator, contrastive_kfac
from contrastive_curvature.laplace.backends.backpack import BackPackContrastiveGGN
from contrastive_curvature.laplace.backends.curvlinops import CurvlinopsContrastiveGGN
from contrastive_curvature.laplace.backends.stochman import StochManContrastiveGGN
from contrastive_curvature.network.encoder import Encoder
from contrastive_curvature.network.module import MathAttention
from contrastive_curvature.testing import dense_ggn

LABELS = torch.arange(6) % 3


def generators() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002


def process_state() -> dict[str, Any]:
    """Everything that threads share and that one could be tempted to change for a while."""
    switches = torch.backends.cuda
    return {
        "nn.Module": [vars(nn.Module)[name] for name in ("__call__", "__getattr__", "__setattr__", "_call_impl")],
        "functions": (sqrt, builtins.len, torch.relu, nn.functional.linear, nn.functional.scaled_dot_product_attention),
        "a trace": torch.fx._symbolic_trace.is_fx_tracing(),
        "names in traces": dict(torch.fx.Tracer._qualname_counter),
        "attention": (switches.flash_sdp_enabled(), switches.mem_efficient_sdp_enabled(), switches.math_sdp_enabled()),
        "attention by cuDNN": switches.cudnn_sdp_enabled(),
        "BackPACK": disable.should_store_io(),
        "dtype": torch.get_default_dtype(),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.cudnn.flags),
        "determinism": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark),
        "anomalies": torch.is_anomaly_enabled(),
        "threads": torch.get_num_threads(),
        "warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "generators": generators(),
    }


class Probe(nn.Module):
    """Passes its input on, and looks around, here and from another thread."""

    def forward(self, x: Tensor) -> Tensor:
        look = seen.append
        here = process_state()

        def elsewhere() -> None:
            look({**process_state(), "gradients": torch.is_grad_enabled(), "a layer": nn.ReLU()(torch.ones(1)).item()})

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        look({**here, "gradients": True, "a layer": 1.0})
        return x


seen: list[dict[str, Any]] = []


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(2, 1, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.unflatten(1, (2, 2))).flatten(1)
        return out


def build(attention: bool = False) -> nn.Module:
    torch.manual_seed(1)
    body = Attention() if attention else nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    return nn.Sequential(body, Probe(), nn.Linear(4, 3), cc.L2Norm()).double().eval()


def data() -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def fitted(subset: str, structure: str, backend: Any = None, **options: Any) -> Callable[[nn.Module], Any]:
    """Fits, predicts, and draws with a generator of its own."""

    def call(model: nn.Module) -> Any:
        x = data()
        la = Laplace(model, "contrastive", subset, structure, backend=backend, backend_kwargs=options)
        la.fit([(x[:3], torch.tensor([0, 0, 1])), (x[3:], torch.tensor([0, 1, 1]))])
        la(x)
        la(x, joint=True)

    return call


def curvature(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: cc.ggn(model, data(), LABELS, pd_fix="psd", **options)


def operator(model: nn.Module) -> Any:
    made = ContrastiveGGNLinearOperator(model, cc.ContrastiveLoss(), None, [(data(), LABELS)])
    return made @ torch.ones(made.shape[1], dtype=torch.float64)


ANY_MODEL: dict[str, Callable[[nn.Module], Any]] = {
    "last layer, diag": fitted("last_layer", "diag"),
    "last layer, kron": fitted("last_layer", "kron"),
    "last layer, full": fitted("last_layer", "full"),
    "all, diag": fitted("all", "diag"),
    "all, full": fitted("all", "full"),
    "all, torch.func": fitted("all", "diag", cc.ContrastiveGGN),
    "all, lowrank": fitted("all", "lowrank", rank=2, pd_fix="positive"),
    "ggn, last layer": curvature(subset_of_weights="last_layer"),
    "ggn, diag": curvature(subset_of_weights="all"),
    "ggn, full": curvature(subset_of_weights="all", structure="full"),
    "operator": operator,
}
LAYERS_ONLY: dict[str, Callable[[nn.Module], Any]] = {
    "all, BackPACK": fitted("all", "diag", BackPackContrastiveGGN),
    "all, kron": fitted("all", "kron"),
    "all, curvlinops": fitted("all", "kron", CurvlinopsContrastiveGGN, pd_fix="psd"),
    "ggn, kron": curvature(subset_of_weights="all", structure="kron"),
    "kfac": lambda model: contrastive_kfac(model, data(), LABELS),
}
CASES = [(name, call, attention) for name, call in ANY_MODEL.items() for attention in (False, True)]
CASES += [(name, call, False) for name, call in LAYERS_ONLY.items()]


@pytest.mark.parametrize(("call", "attention"), [pytest.param(c, a, id=f"{n}{', attention' * a}") for n, c, a in CASES])
def test_nothing_changes_while_it_works(call: Callable[[nn.Module], Any], attention: bool) -> None:
    model = build(attention)
    named, modes = dict(model.named_parameters()), [m.training for m in model.modules()]
    before, grad = process_state(), torch.is_grad_enabled()
    seen.clear()
    call(model)
    assert seen
    wanted = {**before, "gradients": True, "a layer": 1.0}
    for at in seen:
        changed = [name for name, value in wanted.items() if at[name] != value]
        assert not changed
    after = process_state()
    assert [name for name in before if before[name] != after[name]] == []
    assert torch.is_grad_enabled() == grad
    assert all(dict(model.named_parameters())[name] is p for name, p in named.items())
    assert all(p.grad is None for p in named.values())
    assert [m.training for m in model.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    kinds = (nn.Sequential, Attention if attention else nn.Sequential, Probe, nn.Linear, cc.L2Norm)
    assert tuple(type(m) for m in (model, *model)) == kinds


def test_nothing_changes_while_stochman_works() -> None:
    model, before = build(), process_state()
    model.pop(1)
    la = Laplace(model, "contrastive", "all", "diag", backend=StochManContrastiveGGN)
    la.fit([(data(), LABELS)])
    la(data())
    after = process_state()
    assert [name for name in before if before[name] != after[name]] == []


class Listed(nn.Module):
    """Keeps a list of its subclasses, and says so when it is made or looked up."""

    kinds: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        Listed.kinds.append(cls)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Slotted(Listed):
    """With a slot, a call of its own and attributes that are computed."""

    __slots__ = ("factor",)

    def __call__(self, x: Tensor) -> Any:
        return torch.tanh(super().__call__(x))

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("layer") if name == "same_layer" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self, Slotted)
        assert self.__class__ is Slotted
        out: Tensor = nn.Sequential(self.same_layer)[:1][0](x)
        return out


def test_hosts_are_no_business_of_the_users_classes() -> None:
    """Copies are of the user's classes, which hear nothing of it."""
    kinds = list(Listed.kinds)
    torch.manual_seed(0)
    model = nn.Sequential(Slotted(), nn.Linear(4, 3)).double().eval()
    with pytest.raises(cc.UnsupportedError, match="no layer put out"):
        BackPackContrastiveGGN(model, pd_fix="psd").diag(data(), LABELS)
    found = cc.ContrastiveGGN(model, pd_fix="psd").diag(data(), LABELS)[1]
    assert torch.allclose(found, dense_ggn(model, data(), LABELS, pd_fix="psd").diagonal())
    assert Listed.kinds == kinds
    assert [type(m) for m in model] == [Slotted, nn.Linear]


def test_a_compiled_part_is_taken_as_it_was_written() -> None:
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    compiled = nn.Sequential(torch.compile(part, backend="eager"), nn.Linear(4, 3).double()).eval()
    plain = nn.Sequential(part, compiled[1])
    found = BackPackPullback(Encoder(compiled, data())).vjp(data(), torch.ones(6, 1, 3, dtype=torch.float64))
    wanted = BackPackPullback(Encoder(plain, data())).vjp(data(), torch.ones(6, 1, 3, dtype=torch.float64))
    assert torch.allclose(found, wanted)


class Branch(nn.Module):
    """What layers do not show: a branch, an own weight, and a constant in the sum."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        if self.kind == "branch":
            return h if h.sum() > 1e9 else h + h
        if self.kind == "weight":
            return h * self.scale
        if self.kind == "table":
            return h + self._parameters["scale"]
        if self.kind == "sum":
            return h + self.scale
        return h + torch.ones(3, dtype=h.dtype)


@each("kind", ["branch", "weight", "table", "sum", "constant"])
def test_what_layers_do_not_show_is_refused(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Branch(kind)).double().eval()
    with pytest.raises(cc.UnsupportedError, match="ContrastiveGGN"):
        BackPackPullback(Encoder(model, data())).forward(data())


@covering(2, mask=["none", "bool", "float", "causal"], scale=[None, 0.3], grouped=[False, True])
def test_attention_in_plain_operations(mask: str, scale: float | None, grouped: bool) -> None:
    query, key, value = (torch.randn(2, 4, n, 3, dtype=torch.float64) for n in (5, 6, 6))
    if grouped:
        key, value = key[:, :2], value[:, :2]
    seen_by = torch.rand(5, 6) > 0.5
    masks = {"bool": seen_by, "float": torch.randn(2, 1, 5, 6, dtype=torch.float64)}
    seen_by[0] = False
    options: dict[str, Any] = {"attn_mask": masks.get(mask), "is_causal": mask == "causal", "scale": scale}
    wanted = nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, **options)
    with MathAttention():
        found = nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, **options)
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weights", [False, True])
def test_attention_layers_in_plain_operations(weights: bool) -> None:
    """The layer's own forward, and the function that it calls, go another way than the fused kernel."""
    layer, x = nn.MultiheadAttention(4, 2, batch_first=True).double(), torch.randn(3, 5, 4, dtype=torch.float64)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = True
    wanted = layer(x, x, x, key_padding_mask=padding, need_weights=weights)
    with MathAttention():
        found = layer(x, x, x, key_padding_mask=padding, need_weights=weights)
        h = x.clone().requires_grad_()
        out = layer(h, h, h, need_weights=weights)[0]
        (g,) = torch.autograd.grad(out.square().sum(), h, create_graph=True)
        torch.autograd.grad(g.sum(), h)  # fused attention has no second derivative
    assert torch.allclose(found[0], wanted[0])
    assert (found[1] is None) == (wanted[1] is None) == (not weights)
