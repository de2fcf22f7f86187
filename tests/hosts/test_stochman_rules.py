"""StochMan's rules against autograd: which are exact, which are left out, and the sweep that is made of them."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stochman import nnj
from strategies import close
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.hosts.stochman import to_nnj
from contrastive_curvature.hosts.stochman.rules import RefusedError, find_rule

IMAGE, SERIES, FLAT, TOKENS = (2, 4, 4), (2, 5), (4,), (3, 4)
MODES = {"ff": (False, False), "fd": (False, True), "df": (True, False), "dd": (True, True)}
ALL, NONE = tuple(MODES), ()

# Layer, shape of a point, rules for inputs that are exact, rules for parameters that are exact.
LAYERS: dict[str, tuple[Any, tuple[int, ...], tuple[str, ...], tuple[str, ...]]] = {
    "linear": (lambda: nnj.Linear(4, 3), FLAT, ALL, ALL),
    "linear of tokens": (lambda: nnj.Linear(4, 2), TOKENS, NONE, NONE),
    "conv2d": (lambda: nnj.Conv2d(2, 3, 2, bias=False), IMAGE, ALL, ALL),
    "conv2d padded": (lambda: nnj.Conv2d(2, 2, (3, 2), padding=1, bias=False), IMAGE, ALL, ALL),
    "conv2d with a bias": (lambda: nnj.Conv2d(2, 3, 2), IMAGE, ALL, ("dd",)),
    "conv2d strided": (lambda: nnj.Conv2d(2, 3, 2, stride=2, bias=False), IMAGE, ALL, NONE),
    "conv2d with a rest": (lambda: nnj.Conv2d(2, 3, 3, stride=2, bias=False), IMAGE, NONE, NONE),
    "conv2d grouped": (lambda: nnj.Conv2d(2, 4, 2, groups=2, bias=False), IMAGE, ALL, NONE),
    "conv2d same": (lambda: nn.Conv2d(2, 3, 3, padding="same", bias=False), IMAGE, NONE, NONE),
    "conv2d circular": (
        lambda: nnj.Conv2d(2, 3, 3, padding=1, padding_mode="circular", bias=False), IMAGE, NONE, NONE
    ),
    "conv1d": (lambda: nnj.Conv1d(2, 3, 2, stride=2, padding=1), SERIES, NONE, NONE),
    "transposed conv2d": (lambda: nnj.ConvTranspose2d(2, 3, 2), IMAGE, NONE, NONE),
    "upsample": (lambda: nnj.Upsample(scale_factor=2), IMAGE, ("ff", "fd", "df"), NONE),
    "max pool": (lambda: nnj.MaxPool2d(2), IMAGE, ALL, NONE),
    "overlapping max pool": (lambda: nnj.MaxPool2d(3, stride=1, padding=1), IMAGE, NONE, NONE),
    "flatten": (nnj.Flatten, IMAGE, ALL, NONE),
    "reshape": (lambda: nnj.Reshape(2, 2, 1), FLAT, ALL, NONE),
    "identity": (nnj.Identity, IMAGE, ALL, NONE),
    "batch norm": (lambda: nnj.BatchNorm1d(4), FLAT, ALL, NONE),
    "batch norm 2d": (lambda: nnj.BatchNorm2d(2), IMAGE, ALL, NONE),
    "batch norm without weights": (lambda: nnj.BatchNorm1d(4, affine=False), FLAT, NONE, NONE),
    "softmax": (lambda: nnj.Softmax(1), FLAT, NONE, NONE),
    "leaky relu, of another derivative at zero": (nnj.LeakyReLU, FLAT, NONE, NONE),
    "reciprocal": (lambda: nnj.Reciprocal(9.0), FLAT, ALL, NONE),
    "hard tanh": (nnj.Hardtanh, FLAT, ALL, NONE),
    "hard tanh of other limits": (lambda: nnj.Hardtanh(-9, 9), FLAT, NONE, NONE),
    "softplus": (nnj.Softplus, FLAT, ALL, NONE),
    "softplus of a low threshold": (lambda: nnj.Softplus(beta=2, threshold=9), FLAT, NONE, NONE),
    "tanh": (nnj.Tanh, IMAGE, ALL, NONE),
    **{
        kind.__name__: (kind, FLAT, ALL, NONE)
        for kind in (nnj.ReLU, nnj.ELU, nnj.Sigmoid, nnj.Hardshrink, nnj.OneMinusX)
    },
    "none of the host's": (cc.L2Norm, FLAT, NONE, NONE),
}  # fmt: skip


def scatter_statistics(module: nn.Module) -> None:
    """Norm layers that are not the identity."""
    for m in module.modules():
        if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)):
            for p in m.parameters():
                nn.init.normal_(p)
            m.running_mean.uniform_(-0.5, 0.5)
            m.running_var.uniform_(0.5, 2)


def autograd_jacobians(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Jacobians with respect to the inputs (B, O, I) and the parameters (B, O, P), point by point."""
    values = dict(layer.named_parameters())
    inputs, weights = [], []
    for point in x:
        one = point.unsqueeze(0)
        inputs.append(torch.autograd.functional.jacobian(layer, one).reshape(layer(one).numel(), point.numel()))

        def outputs(*params: Tensor, one: Tensor = one) -> Tensor:
            return torch.func.functional_call(layer, dict(zip(values, params, strict=True)), (one,)).flatten()

        if values:
            found = torch.autograd.functional.jacobian(outputs, tuple(p.detach() for p in values.values()))
            weights.append(torch.cat([j.flatten(1) for j in found], 1))
        else:
            weights.append(one.new_zeros(layer(one).numel(), 0))
    return torch.stack(inputs).detach(), torch.stack(weights).detach()


@pytest.mark.parametrize("kind", LAYERS)
@settings(max_examples=5)
@given(b=st.integers(1, 3), seed=st.integers(0, 2**16))
def test_rules_are_exact_or_left_out(kind: str, b: int, seed: int, device: str) -> None:
    torch.manual_seed(seed)
    make, shape, of_inputs, of_weights = LAYERS[kind]
    made = make().double()
    scatter_statistics(made)
    (layer,) = to_nnj(made.to(device))
    x = torch.randn(b, *shape, dtype=torch.float64).to(device)
    jacobians = autograd_jacobians(layer, x)
    # An empty image, on which wrong rules are right.
    probes = torch.zeros(1, *shape, dtype=torch.float64).to(device)
    size = jacobians[0].shape[1]
    m = torch.randn(b, size, size, dtype=torch.float64, device=x.device)
    for (of, j, exact), mode in product(
        zip(("input", "weight"), jacobians, (of_inputs, of_weights), strict=True), MODES
    ):
        diag_inp, diag_out = MODES[mode]
        if mode not in exact:
            if j.numel() or of == "input":
                with torch.no_grad(), pytest.raises(RefusedError, match="StochMan"):
                    find_rule(of, layer, probes, diag_inp=diag_inp, diag_out=diag_out)
            continue
        with torch.no_grad():
            rule = find_rule(of, layer, probes, diag_inp=diag_inp, diag_out=diag_out)
            found = rule(layer, x, layer(x), m.diagonal(dim1=1, dim2=2) if diag_inp else m)
        truth = j.mT @ (torch.diag_embed(m.diagonal(dim1=1, dim2=2)) if diag_inp else m) @ j
        assert found.dtype == torch.float64
        assert close(found, truth.diagonal(dim1=1, dim2=2) if diag_out else truth, 1.0, 1e-12), mode


def test_a_wrong_rule_is_found_out_and_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nnj.Linear(4, 3).to(device), torch.randn(2, 4, device=device)
    right = nnj.Linear._jacobian_wrt_weight_sandwich
    wrong = {
        "off by 2%": lambda *a, **k: 1.02 * right(*a, **k),
        r"gives None where there is \(3, 15\)": lambda *_, **__: None,
        "raises ValueError: no": lambda *_, **__: (_ for _ in ()).throw(ValueError("no")),
    }
    for message, rule in wrong.items():
        monkeypatch.setattr(nnj.Linear, "_jacobian_wrt_weight_sandwich", rule)
        with torch.no_grad(), pytest.raises(RefusedError, match=message):
            find_rule("weight", layer, x, diag_inp=False, diag_out=True)
    assert torch.zeros(1).dtype == torch.get_default_dtype()
