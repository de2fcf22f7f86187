"""The paper's Hessian calculators against the oracle: loss, gradient and Hessian, for weights and for inputs."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import close
from tables import covering, each
from test_stochman import build
from test_stochman_rules import autograd_jacobians
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.hosts.stochman import ArccosHessianCalculator, ContrastiveHessianCalculator, to_nnj
from contrastive_curvature.hosts.stochman import sweep as widths
from contrastive_curvature.hosts.stochman.sweep import feature_maps
from contrastive_curvature.network import pullback as limits
from contrastive_curvature.testing import dense_jacobian, dense_output_hessian, list_pairs, pair_loss

CALCULATORS = {"euclidean": ContrastiveHessianCalculator, "arccos": ArccosHessianCalculator}
LONG = {"pos": "positive", "fix": "fixed", "full": "full", "psd": "psd"}
UNTIED = ("in-place relu", "conv", "biased conv", "conv1d", "norms", "frozen", "host")
FAST = ("in-place relu", "frozen", "host")

Drawn = tuple[nn.Module, Tensor, tuple[Tensor, ...], str, dict[str, Any]]


@st.composite
def drawn_cases(draw: st.DrawFn, networks: tuple[str, ...] = UNTIED) -> Drawn:
    n, dim, seed = draw(st.integers(1, 5)), draw(st.integers(2, 3)), draw(st.integers(0, 2**16))
    torch.manual_seed(seed)
    model = build(draw(st.sampled_from(networks)), dim)
    x = torch.randn(n, 4, dtype=torch.float64)
    tuples = tuple(torch.randint(0, n, (draw(st.sampled_from((3, 4))), draw(st.integers(1, 8)))))
    given = {
        "method": draw(st.sampled_from(tuple(LONG))),
        "margin": draw(st.sampled_from((None, 0.7, 1.5))),
        "negative_weight": draw(st.sampled_from((0.5, 0.2, 1.0))),
    }
    return model, x, tuples, draw(st.sampled_from(tuple(CALCULATORS))), given


def true_hessian(drawn: Drawn) -> tuple[Tensor, float]:
    """Of the raw outputs; and the size of the terms that may cancel."""
    model, x, tuples, distance, given = drawn
    z = model(x).detach()
    options = {"margin": given["margin"], "negative_weight": given["negative_weight"], "normalization": "sum"}
    h = 2 * dense_output_hessian(z, pairs=tuples, distance=distance, pd_fix=LONG[given["method"]], **options)
    return h, 2e-3 * 2 * len(tuples[0]) / float(z.norm(dim=1).min() ** 2)


def calculator(drawn: Drawn, **kwargs: Any) -> Any:
    return CALCULATORS[drawn[3]](**kwargs, **drawn[4])


def moved(drawn: Drawn, device: str) -> tuple[Tensor, nn.Module, tuple[Tensor, ...]]:
    model, x, tuples = drawn[:3]
    return x.to(device), nn.Sequential(model, cc.L2Norm()).to(device), tuple(t.to(device) for t in tuples)


def input_jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """(N, D, I)."""
    found = [torch.autograd.functional.jacobian(lambda p: model(p.unsqueeze(0))[0], point).flatten(1) for point in x]
    return torch.stack(found)


@pytest.mark.parametrize("speed", ["half", "slow"])
@settings(max_examples=15)
@given(drawn=drawn_cases(), elements=st.sampled_from((2**25, 300, 30)), widest=st.sampled_from((1024, 3)))
def test_hessian_wrt_weights_is_exact(drawn: Drawn, elements: int, widest: int, speed: str, device: str) -> None:
    model, x = drawn[:2]
    h, size = true_hessian(drawn)
    jacobian = dense_jacobian(model, x)
    truth = jacobian.T @ h @ jacobian
    size *= float(jacobian.square().sum())
    inputs = moved(drawn, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "JACOBIAN_ELEMENTS", elements)
        patch.setattr(widths, "WIDEST", widest)
        found = {
            shape: calculator(drawn, shape=shape, speed=speed).compute_hessian(*inputs)
            for shape in ("diagonal", "block", "full")
        }
    assert close(found["diagonal"].cpu(), truth.diagonal(), size)
    assert close(found["full"].cpu(), truth, size)
    groups = [[p.numel() for p in leaf.parameters(recurse=False) if p.requires_grad] for leaf in model.modules()]
    edges = torch.tensor([0, *(sum(group) for group in groups if group)]).cumsum(0).tolist()
    assert len(found["block"]) == len(edges) - 1
    for block, (start, stop) in zip(found["block"], pairwise(edges), strict=True):
        assert close(block.cpu(), truth[start:stop, start:stop], size)


@pytest.mark.parametrize("speed", ["half", "slow"])
@settings(max_examples=10)
@given(drawn=drawn_cases(), widest=st.sampled_from((1024, 3)))
def test_hessian_wrt_inputs_is_exact(drawn: Drawn, widest: int, speed: str, device: str) -> None:
    model, x = drawn[:2]
    h, size = true_hessian(drawn)
    j = input_jacobian(model, x).detach()
    n, dim, width = j.shape
    truth = torch.einsum("iak,iajb,jbl->ikjl", j, h.view(n, dim, n, dim), j)
    size *= float(j.square().sum())
    inputs = moved(drawn, device)
    points = torch.arange(n)
    blocks = truth[points, :, points, :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(widths, "WIDEST", widest)
        block, diagonal, full = (
            calculator(drawn, wrt="input", shape=shape, speed=speed).compute_hessian(*inputs).cpu()
            for shape in ("block", "diagonal", "full")
        )
    assert close(block, blocks, size)
    assert close(diagonal, blocks.diagonal(dim1=1, dim2=2), size)
    assert close(full, truth.reshape(n * width, n * width), size)


@settings(max_examples=20)
@given(drawn=drawn_cases())
def test_loss_and_gradient(drawn: Drawn, device: str) -> None:
    model, x, tuples, _, options = drawn
    weights = {
        (i, j, sign): 2 * sign * times * (options["negative_weight"] if sign < 0 else 1 - options["negative_weight"])
        for (i, j, sign), times in list_pairs(len(x), pairs=tuples).items()
        if sign > 0 or options["method"] != "pos"
    }
    inputs = x.clone().requires_grad_()
    z = model(inputs)
    u = z / z.norm(dim=1, keepdim=True)
    truth = pair_loss(u, u, weights, options["margin"])
    params = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(truth, [inputs, *params])
    expected = torch.cat([g.flatten() for g in gradients[1:]])
    size = float(len(tuples[0]) / z.detach().norm(dim=1).min())
    arguments = moved(drawn, device)
    loss = calculator(drawn).compute_loss(*arguments).detach().cpu()
    assert close(loss, truth.detach(), float(len(tuples[0])))
    assert close(calculator(drawn).compute_gradient(*arguments).cpu(), expected, size)
    assert close(calculator(drawn, wrt="input").compute_gradient(*arguments).cpu(), gradients[0], size)


@settings(max_examples=10)
@given(drawn=drawn_cases(FAST))
def test_fast_is_the_diagonal_sweep(drawn: Drawn, device: str) -> None:
    """Of diagonals from the normalisation on for one distance, from the last layer on for the other."""
    drawn[4]["method"] = "fix"
    model, x = drawn[:2]
    h, size = true_hessian(drawn)
    network, n = to_nnj(model), len(x)
    points = torch.arange(n)
    m = h.view(n, -1, n, h.shape[0] // n)[points, :, points, :]
    if drawn[3] == "euclidean":
        m = torch.diag_embed(m.diagonal(dim1=1, dim2=2))
    size *= float(dense_jacobian(model, x).square().sum() + 1)
    blocks = []
    for layer, at in reversed(list(zip(network, feature_maps(list(network), x), strict=False))):
        wrt_input, wrt_weight = autograd_jacobians(layer, at)
        flags = torch.cat([torch.zeros(0), *(torch.full((p.numel(),), p.requires_grad) for p in layer.parameters())])
        if flags.any():
            chosen = wrt_weight[..., flags.bool()]
            blocks.append((chosen.mT @ m @ chosen).sum(0))
        m = torch.diag_embed((wrt_input.mT @ m @ wrt_input).diagonal(dim1=1, dim2=2))
    inputs = moved(drawn, device)
    diagonal = torch.cat([block.diagonal() for block in blocks[::-1]])
    assert close(calculator(drawn, speed="fast").compute_hessian(*inputs).cpu(), diagonal, size)
    found = calculator(drawn, speed="fast", shape="block").compute_hessian(*inputs)
    assert all(close(a.cpu(), b, size) for a, b in zip(found, blocks[::-1], strict=True))
    of_inputs = calculator(drawn, speed="fast", wrt="input").compute_hessian(*inputs).cpu()
    assert close(of_inputs, m.diagonal(dim1=1, dim2=2), size)


@each(
    "options, error, message",
    [
        ({"wrt": "weights"}, InputError, "wrt: expected one of 'weight', 'input'"),
        ({"shape": "diag"}, InputError, "shape: expected one of 'diagonal', 'block', 'full'"),
        ({"speed": "quick"}, InputError, "speed: expected one of 'slow', 'half', 'fast'"),
        ({"margin": 3}, InputError, "margin: expected"),
        ({"speed": "fast", "shape": "full"}, UnsupportedError, "cross-layer.*speed='half'"),
        ({"speed": "fast", "method": "pos"}, UnsupportedError, "every pair.*speed='half'"),
    ],
)
def test_refuses_options(options: dict[str, Any], error: type[Exception], message: str, device: str) -> None:
    with pytest.raises(error, match=message):
        ArccosHessianCalculator(**options)


def test_refuses_networks_it_has_no_answer_for(device: str) -> None:
    x, tuples = torch.randn(4, 4, device=device), tuple(torch.tensor([[0], [1], [2]], device=device))
    conv = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 2, 1), nn.Flatten())
    for calculator, network, message in (
        (ContrastiveHessianCalculator(), nn.Linear(4, 2), "L2Norm"),
        (ArccosHessianCalculator(), nn.Sequential(nn.Linear(4, 2), nn.GELU()), r"'1' \(GELU\)"),
        (ArccosHessianCalculator(speed="fast"), conv, r"layer '1' \(Conv1d\): StochMan has no sandwich.*speed='half'"),
        (ArccosHessianCalculator(speed="fast"), build("tied", 2).float(), r"shared between layers.*speed='half'"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            calculator.compute_hessian(x, network.to(device), tuples)


@covering(1, speed=["half", "slow"], method=LONG)
def test_tied_weights_are_exact(speed: str, method: str, device: str) -> None:
    torch.manual_seed(0)
    model = build("tied", 2)
    x, tuples = torch.randn(5, 4, dtype=torch.float64), tuple(torch.randint(0, 5, (3, 6)))
    drawn: Drawn = (model, x, tuples, "arccos", {"method": method, "margin": None, "negative_weight": 0.5})
    h, size = true_hessian(drawn)
    j = dense_jacobian(model, x)
    for shape, truth in (("full", j.T @ h @ j), ("diagonal", (j.T @ h @ j).diagonal())):
        assert close(
            calculator(drawn, shape=shape, speed=speed).compute_hessian(*moved(drawn, device)).cpu(), truth, size
        )
