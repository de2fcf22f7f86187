"""What belongs to the whole process stays as it is while the library works: seen from inside, and by another thread."""

from __future__ import annotations

import builtins
import os
import random
import threading
import warnings
from collections.abc import Callable
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from backpack import disable
from laplace import Laplace
from tables import covering
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

import contrastive_curvature as cc
from contrastive_curvature.laplace.backends.backpack import BackPackContrastiveGGN
from contrastive_curvature.network.module import MathAttention

LABELS = torch.arange(6) % 3


def generators() -> tuple[Any, ...]:
    # torch 2.6 cannot read a tensor of the outside inside of torch.func.
    with temporarily_clear_interpreter_stack():
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


def operator(model: nn.Module) -> Any:
    made = cc.ContrastiveGGNLinearOperator(model, cc.ContrastiveLoss(), None, [(data(), LABELS)])
    return made @ torch.ones(made.shape[1], dtype=torch.float64)


ANY_MODEL: dict[str, Callable[[nn.Module], Any]] = {
    "last layer": fitted("last_layer", "diag"),
    "all, diag": fitted("all", "diag"),
    "all, torch.func": fitted("all", "diag", cc.ContrastiveGGN),
    "ggn, full": lambda model: cc.ggn(model, data(), LABELS, pd_fix="psd", structure="full"),
    "operator": operator,
}
WITHOUT_ATTENTION: dict[str, Callable[[nn.Module], Any]] = {
    "all, BackPACK": fitted("all", "diag", BackPackContrastiveGGN),
    "all, kron": fitted("all", "kron"),
}
CASES = [(name, call, attention) for name, call in ANY_MODEL.items() for attention in (False, True)]
CASES += [(name, call, False) for name, call in WITHOUT_ATTENTION.items()]


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
