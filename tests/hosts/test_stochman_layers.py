"""StochMan's layers with sandwiches against autograd."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import close
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.hosts.stochman import Residual, Sequential, layers, to_nnj

pytestmark = pytest.mark.parametrize("device", DEVICES)

IMAGE, SERIES, FLAT, TOKENS = (2, 4, 4), (2, 5), (4,), (3, 4)

LAYERS = {
    "linear": (lambda: layers.Linear(4, 3), FLAT),
    "linear without bias": (lambda: layers.Linear(4, 3, bias=False), FLAT),
    "linear of tokens": (lambda: layers.Linear(4, 2), TOKENS),
    "conv1d": (lambda: layers.Conv1d(2, 3, 2, stride=2, padding=1), SERIES),
    "conv1d dilated": (lambda: layers.Conv1d(2, 2, 2, dilation=2, bias=False), SERIES),
    "conv2d": (lambda: layers.Conv2d(2, 2, 2), IMAGE),
    "conv2d strided": (lambda: layers.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(0, 1), bias=False), IMAGE),
    "conv2d same": (lambda: layers.Conv2d(2, 1, 3, padding="same"), IMAGE),
    "conv2d grouped": (lambda: layers.Conv2d(2, 4, 2, groups=2), IMAGE),
    "conv2d circular": (lambda: layers.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), IMAGE),
    "relu": (layers.ReLU, FLAT),
    "leaky relu": (lambda: layers.LeakyReLU(0.1), FLAT),
    "elu": (lambda: layers.ELU(1.5), FLAT),
    "gelu": (layers.GELU, FLAT),
    "gelu by tanh": (lambda: layers.GELU("tanh"), SERIES),
    "silu": (layers.SiLU, FLAT),
    "softplus": (lambda: layers.Softplus(beta=2, threshold=1), FLAT),
    "sigmoid": (layers.Sigmoid, IMAGE),
    "tanh": (layers.Tanh, IMAGE),
    "max pool": (lambda: layers.MaxPool2d(2), IMAGE),
    "overlapping max pool": (lambda: layers.MaxPool2d(3, stride=1, padding=1), IMAGE),
    "average pool": (lambda: layers.AvgPool2d(2, padding=1), IMAGE),
    "adaptive pool": (lambda: layers.AdaptiveAvgPool2d((1, 3)), IMAGE),
    "flatten": (layers.Flatten, IMAGE),
    "flatten the last": (lambda: layers.Flatten(2), IMAGE),
    "unflatten": (lambda: layers.Unflatten(1, (2, 2)), FLAT),
    "reshape": (lambda: layers.Reshape(2, 2, 1), FLAT),
    "batch norm": (lambda: layers.BatchNorm1d(4), FLAT),
    "batch norm of series": (lambda: layers.BatchNorm1d(2), SERIES),
    "batch norm without weights": (lambda: layers.BatchNorm2d(2, affine=False), IMAGE),
    "batch norm 2d": (lambda: layers.BatchNorm2d(2), IMAGE),
    "layer norm": (lambda: layers.LayerNorm(4), FLAT),
    "dropout": (lambda: layers.Dropout(0.5), FLAT),
    "identity": (layers.Identity, IMAGE),
    "l2 norm": (layers.L2Norm, FLAT),
    "residual": (lambda: Residual(Sequential(layers.Linear(4, 3), layers.Tanh(), layers.Linear(3, 4))), FLAT),
    "residual conv": (lambda: Residual(Sequential(layers.Conv2d(2, 2, 3, padding=1), layers.ELU())), IMAGE),
    "nested": (lambda: Sequential(Residual(Residual(Sequential(layers.Linear(4, 4)))), layers.Softplus()), FLAT),
    "sequential": (
        lambda: Sequential(
            layers.Conv2d(2, 2, 2), layers.Tanh(), layers.MaxPool2d(2), layers.Flatten(), layers.Linear(2, 3)
        ),
        IMAGE,
    ),
    "empty": (Sequential, FLAT),
}  # fmt: skip


def scatter_statistics(module: nn.Module) -> None:
    """Norm layers that are not the identity."""
    for m in module.modules():
        if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm)):
            for p in m.parameters():
                nn.init.normal_(p)
        if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)):
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
            weights.append(one.new_zeros(1, 0))
    return torch.stack(inputs).detach(), torch.stack(weights).detach()


@pytest.mark.parametrize("kind", LAYERS)
@settings(max_examples=5)
@given(b=st.integers(1, 3), seed=st.integers(0, 2**16))
def test_jacobian_and_all_four_sandwiches(kind: str, b: int, seed: int, device: str) -> None:
    torch.manual_seed(seed)
    make, shape = LAYERS[kind]
    layer = make().double().requires_grad_(False)
    scatter_statistics(layer)
    layer.to(device)
    x = torch.randn(b, *shape, dtype=torch.float64).to(device)
    wrt_input, wrt_weight = autograd_jacobians(layer, x)
    val, jacobian = layer(x, jacobian=True)
    assert torch.equal(val, layer(x))
    assert jacobian.shape == (b, *val.shape[1:], *shape)
    assert close(jacobian.reshape(wrt_input.shape), wrt_input, 1.0, 1e-12)
    columns = torch.randn(b, *shape, 2, 3, dtype=torch.float64, device=x.device)
    pushed = layer._jacobian_wrt_input_mult_left_vec(x, val, columns)
    assert pushed.shape == (*val.shape, 2, 3)
    assert close(pushed.reshape(b, -1, 6), wrt_input @ columns.reshape(b, -1, 6), 1.0, 1e-12)
    size = val[0].numel()
    full = torch.randn(b, size, size, dtype=torch.float64, device=x.device)
    for diag_inp in (False, True):
        tmp = full.diagonal(dim1=1, dim2=2) if diag_inp else full
        matrix = torch.diag_embed(tmp) if diag_inp else full
        for j, sandwich in (
            (wrt_input, layer._jacobian_wrt_input_sandwich),
            (wrt_weight, layer._jacobian_wrt_weight_sandwich),
        ):
            for diag_out in (False, True):
                found = sandwich(x, val, tmp, diag_inp=diag_inp, diag_out=diag_out)
                if j is wrt_weight and not any(True for _ in layer.parameters()):
                    assert found is None
                    continue
                truth = j.mT @ matrix @ j
                assert close(found, truth.diagonal(dim1=1, dim2=2) if diag_out else truth, 1.0, 1e-12)


@settings(max_examples=8)
@given(seed=st.integers(0, 2**16), b=st.integers(1, 3))
def test_one_sweep_gives_every_layers_block(seed: int, b: int, device: str) -> None:
    torch.manual_seed(seed)
    inner = Sequential(layers.Linear(3, 3, bias=False), layers.GELU())
    network = Sequential(layers.Linear(4, 3), layers.Tanh(), Residual(inner), layers.LayerNorm(3), layers.Linear(3, 2))
    network.double().requires_grad_(False).to(device)
    x = torch.randn(b, 4, dtype=torch.float64).to(device)
    m = torch.randn(b, 2, 2, dtype=torch.float64).to(device)
    wrt_input, wrt_weight = autograd_jacobians(network, x)
    truth = (wrt_weight.mT @ m @ wrt_weight).sum(0)
    (full,) = network.sandwich(x, m, "full")
    assert close(full, truth)
    assert close(torch.cat(network.sandwich(x, m)), truth.diagonal())
    blocks = network.sandwich(x, m, "block")
    assert [len(block) for block in blocks] == [15, 9, 6, 8]
    start = 0
    for block in blocks:
        part = slice(start, start + len(block))
        assert close(block, truth[part, part], float(truth.abs().max()))
        start += len(block)
    of_inputs = wrt_input.mT @ m @ wrt_input
    assert close(network.input_sandwich(x, m, "block"), of_inputs)
    assert close(network.input_sandwich(x, m), of_inputs.diagonal(dim1=1, dim2=2), float(of_inputs.abs().max()))


@settings(max_examples=8)
@given(seed=st.integers(0, 2**16))
def test_approximate_sweep_keeps_diagonals_between_layers(seed: int, device: str) -> None:
    """The definition of ``speed="fast"``, written out for three layers; and it is no exact one."""
    torch.manual_seed(seed)
    network = (
        Sequential(layers.Linear(4, 3), layers.Tanh(), layers.Linear(3, 2)).double().requires_grad_(False).to(device)
    )
    x = torch.randn(1, 4, dtype=torch.float64).to(device)
    m = torch.eye(2, dtype=torch.float64, device=x.device).unsqueeze(0) + 0.5
    hidden = network[0](x)
    slope = 1 - hidden.tanh() ** 2
    after = (network[2].weight * (m[0] @ network[2].weight)).sum(0)
    before = slope**2 * after
    expected = torch.cat([(before.T @ x**2).flatten(), before.flatten()])
    assert close(network.sandwich(x, m, approximate=True)[0], expected)
    assert close(network.input_sandwich(x, m, approximate=True), before @ network[0].weight ** 2)
    exact = network.sandwich(x, m)[0]
    assert close(expected, exact)  # a weight's own diagonal entry needs no more than the diagonal
    deep = Sequential(layers.Linear(4, 4), *network).double().requires_grad_(False).to(device)
    assert not close(deep.sandwich(x, m, approximate=True)[0], deep.sandwich(x, m)[0], tolerance=1e-6)


def test_full_matrix_has_no_approximation(device: str) -> None:
    network = Sequential(layers.Linear(2, 2)).to(device)
    x, m = torch.ones(1, 2, device=device), torch.ones(1, 2, device=device)
    with pytest.raises(cc.InputError, match="'diagonal' or 'block'"):
        network.sandwich(x, m, "full", approximate=True)


def test_batch_statistics_and_dropout_play_no_part(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.9)).to(device).train()
    made = to_nnj(model)
    x = torch.randn(5, 3, device=device)
    before = model[0].running_mean.clone()
    assert torch.equal(made(x), model.eval()(x))
    assert torch.equal(made.train()(x), model(x))
    assert torch.equal(model[0].running_mean, before)


def test_jacobians_of_composites_that_hold_torchs_layers(device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, device=device)
    body = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.5), nn.Tanh())).double().to(device)
    body.requires_grad_(False)
    m = torch.eye(4, dtype=torch.float64, device=device).expand(3, 4, 4)
    for network in (Residual(body), Sequential(*body), Sequential(Residual(Sequential(*body)))):
        network.train()
        val, jacobian = network(x, jacobian=True)
        assert torch.equal(val, to_nnj(network)(x))
        wrt_input, wrt_weight = autograd_jacobians(to_nnj(network).requires_grad_(False), x)
        assert close(jacobian, wrt_input, 1.0, 1e-12)
        found = network._jacobian_wrt_weight_sandwich(x, val, m)
        assert close(found, wrt_weight.mT @ wrt_weight, 1.0, 1e-12)
    network = Sequential(*body)
    assert close(network.sandwich(x, m)[0], to_nnj(network).sandwich(x, m)[0])
    assert close(network.input_sandwich(x, m), to_nnj(network).input_sandwich(x, m))
    for odd in (Sequential(nn.Softmax(1)), Residual(nn.Softmax(1))):
        with pytest.raises(cc.UnsupportedError, match="Softmax"):
            odd(x, jacobian=True)
