"""Pair losses in BackPACK's extensions and in ours, against the dense curvature."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backpack import backpack, extend
from backpack.extensions import (
    GGNMP,
    HMP,
    KFAC,
    KFLR,
    KFRA,
    PCHMP,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDiagHessian,
    BatchGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
    SqrtGGNMC,
)
from backpack_networks import FLAT, SEQUENTIAL, Drawn, build, hosted_cases, truth_and_size
from hypothesis import assume, example, given
from strategies import INPUTS, Case, close
from tables import each
from torch import Tensor, nn

import contrastive_curvature as cc
from contrastive_curvature import register
from contrastive_curvature.hosts.backpack import CurvatureFactor, DiagCurvature
from contrastive_curvature.hosts.backpack import module_derivatives as derivatives
from contrastive_curvature.testing import dense_output_hessian

KRONECKER = ("linear", "no bias", "relu")
"""Networks of layers that KFAC and KFLR know; GGNMP knows batch normalisation too."""


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def backward(drawn: Drawn, device: str, *extensions: Any, factor: float = 1.0) -> nn.Module:
    """The extended model after a backward pass of the extended loss, times a factor."""
    model, x, case = drawn
    moved = case.to(device)
    options = {k: v for k, v in case.options.items() if k not in ("margin", "negative_weight", "normalization")}
    made = cc.ContrastiveLoss(
        case.options["margin"], case.options["negative_weight"], case.options["normalization"], **options
    )
    for module in model.modules():
        # The host's hooks refuse what works in place.
        module.inplace = False
    model, loss_fn = extend(model.to(device)), extend(made)
    with backpack(*extensions):
        z = model(x.to(device))
        value = loss_fn(z, moved.labels) if case.pairs is None else loss_fn(z, moved.labels, pairs=moved.pairs)
        (factor * value).backward()
    return model


def fixed(kind: str, **more: Any) -> Drawn:
    """A small network and five points of two classes."""
    torch.manual_seed(0)
    model, x = build(kind, 3), torch.randn(5, INPUTS, dtype=torch.float64)
    options = {"pd_fix": "psd", "distance": "arccos", "margin": None, "negative_weight": 0.2, "normalization": "sum"}
    return model, x, Case(model(x).detach(), torch.tensor([0, 0, 1, 1, 1]), None, options | more)


def check_products(model: nn.Module, field: str, truth: Tensor, size: float) -> None:
    """Every parameter's product with the unit matrix is its block of the truth."""
    start = 0
    for p in model.parameters():
        block = truth[start : start + p.numel(), start : start + p.numel()]
        start += p.numel()
        eye = torch.eye(p.numel(), dtype=p.dtype, device=p.device).view(-1, *p.shape)
        assert close(getattr(p, field)(eye).flatten(1).detach().cpu(), block, size)


def gather(model: nn.Module, field: str) -> Tensor:
    return torch.cat([getattr(p, field).flatten() for p in model.parameters()]).cpu()


def psd_cases(kinds: tuple[str, ...] = SEQUENTIAL) -> Any:
    def force(drawn: Drawn) -> Drawn:
        drawn[2].options["pd_fix"] = "psd"
        return drawn

    return hosted_cases(kinds).map(force)


@given(drawn=hosted_cases(SEQUENTIAL))
def test_our_extensions_are_exact_for_every_fix(drawn: Drawn, device: str) -> None:
    truth, size = truth_and_size(drawn)
    model = backward(drawn, device, DiagCurvature(), CurvatureFactor("factor"))
    assert close(gather(model, "diag_curvature"), truth.diagonal(), size)
    factors = [p.factor for p in model.parameters()]
    whole = torch.cat([f.columns.flatten(1) for f in factors], dim=1).cpu()
    assert close(whole.T @ torch.diag(factors[0].signs.cpu()) @ whole, truth, size)
    assert not any(f.columns.requires_grad for f in factors)


@given(drawn=psd_cases(FLAT))
def test_square_roots_of_psd_blocks(drawn: Drawn, device: str) -> None:
    truth, size = truth_and_size(drawn)
    model = backward(drawn, device, DiagGGNExact(), BatchDiagGGNExact(), SqrtGGNExact(), BatchGrad())
    assert close(gather(model, "diag_ggn_exact"), truth.diagonal(), size)
    parameters = list(model.parameters())
    batch = torch.cat([p.diag_ggn_exact_batch.flatten(1) for p in parameters], dim=1).cpu()
    assert close(batch.sum(0), truth.diagonal(), size)
    whole = [p.sqrt_ggn_exact for p in parameters]
    root = torch.cat([s.flatten(2).flatten(0, 1) for s in whole], dim=1).cpu()
    assert close(root.T @ root, truth, size)
    gradients = torch.cat([p.grad_batch.flatten(1) for p in parameters], dim=1).cpu()
    assert close(gradients.sum(0), torch.cat([p.grad.flatten() for p in parameters]).cpu(), size)
    last = len(drawn[1]) - 1
    part = [p.sqrt_ggn_exact for p in backward(drawn, device, SqrtGGNExact(subsampling=[last])).parameters()]
    assert all(close(b, a[:, [last]], float(a.abs().max())) for a, b in zip(whole, part, strict=True))


@given(drawn=psd_cases(KRONECKER))
def test_kflr_has_the_exact_factors_of_biases(drawn: Drawn, device: str) -> None:
    truth, size = truth_and_size(drawn)
    start = 0
    for p in backward(drawn, device, KFLR()).parameters():
        if p.ndim == 1:
            assert close(p.kflr[0].cpu(), truth[start : start + len(p), start : start + len(p)], size)
        elif len(drawn[1]) == 1:
            block = truth[start : start + p.numel(), start : start + p.numel()]
            assert close(torch.kron(*p.kflr).detach().cpu(), block, size)
        start += p.numel()


@given(drawn=hosted_cases(KRONECKER))
def test_kfra_averages_the_blocks_indefinite_ones_too(drawn: Drawn, device: str) -> None:
    assume(not cc.PDFix(drawn[2].options["pd_fix"]).coupled)
    _, x, case = drawn
    h = dense_output_hessian(case.z, **case.all).view(len(x), case.z.shape[1], len(x), -1)
    blocks = sum(h[i, :, i] for i in range(len(x)))
    size = truth_and_size(drawn)[1]
    last = [m for m in backward(drawn, device, KFRA()).modules() if isinstance(m, nn.Linear)][-1]
    assert close(last.weight.kfra[0].cpu(), blocks, size)


@given(drawn=psd_cases(FLAT))
def test_sampled_roots_with_the_noise_fed(drawn: Drawn, device: str) -> None:
    """With 2^k sign vectors that are orthogonal, the sampled factor squares to the Hessian exactly."""
    truth, size = truth_and_size(drawn)
    signs = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    wide = torch.kron(torch.tensor([[1, 1], [1, -1]]), signs)

    def noise(low: int, high: int, shape: tuple[int, ...], **_: Any) -> Tensor:
        assert (low, high, shape[0]) == (0, 2, 8)
        return ((wide[:, : shape[2]] + 1) // 2).unsqueeze(1).expand(shape).to(device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(derivatives.torch, "randint", noise)
        model = backward(drawn, device, DiagGGNMC(8), BatchDiagGGNMC(8), SqrtGGNMC(8))
    assert close(gather(model, "diag_ggn_mc"), truth.diagonal(), size)
    parameters = list(model.parameters())
    batch = torch.cat([p.diag_ggn_mc_batch.flatten(1) for p in parameters], dim=1).cpu()
    assert close(batch.sum(0), truth.diagonal(), size)
    root = torch.cat([p.sqrt_ggn_mc.flatten(2).flatten(0, 1) for p in parameters], dim=1).cpu()
    assert close(root.T @ root, truth, size)
    if any(isinstance(m, (nn.LogSigmoid, nn.BatchNorm1d, nn.ELU)) for m in model.modules()):
        return  # layers that KFAC does not know
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(derivatives.torch, "randint", noise)
        backward(drawn, device, KFAC(8))
    backward(drawn, device, KFLR())
    for p in model.parameters():
        assert all(close(a, b, size) for a, b in zip(p.kfac, p.kflr, strict=True))


@given(drawn=hosted_cases((*KRONECKER, "batchnorm")))
def test_products_with_every_fix(drawn: Drawn, device: str) -> None:
    """Indefinite and coupled ones: what is propagated is a product with the whole batch's Hessian."""
    truth, size = truth_and_size(drawn)
    check_products(backward(drawn, device, GGNMP()), "ggnmp", truth, size)


def hessian_of(function: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> Tensor:
    """Dense Hessian with respect to all parameters of a function of the outputs, by autograd."""
    names, values = zip(*model.named_parameters(), strict=True)
    sizes = [p.numel() for p in values]

    def value(flat: Tensor) -> Tensor:
        split = {n: t.view_as(p) for n, t, p in zip(names, flat.split(sizes), values, strict=True)}
        return function(torch.func.functional_call(model, split, (x,)))

    return torch.autograd.functional.hessian(value, torch.cat([p.detach().flatten() for p in values]))


@given(drawn=hosted_cases(("relu", "no bias", "linear", "normalised")))
@example(drawn=fixed("normalised"))
def test_hmp_is_the_hessian_of_the_loss(drawn: Drawn, device: str) -> None:
    """With ``arccos`` and ``full``, and through a normalisation layer too."""
    model, x, case = drawn
    case.options.update(distance="arccos", pd_fix="full")
    size = truth_and_size(drawn)[1]
    loss_fn = cc.ContrastiveLoss(*(case.options[k] for k in ("margin", "negative_weight", "normalization")))
    truth = hessian_of(lambda z: loss_fn(z, case.labels, pairs=case.pairs), model, x)
    check_products(backward(drawn, device, HMP()), "hmp", truth, 1e2 * size)
    check_products(backward(drawn, device, HMP(), factor=-3.0), "hmp", -3 * truth, 3e2 * size)


@given(drawn=hosted_cases(("normalised",)))
def test_a_normalisation_layer_gives_the_euclidean_curvature(drawn: Drawn, device: str) -> None:
    model, x, case = drawn
    case.options["distance"] = "euclidean"
    body = model[0]
    case.z = body(x).detach()
    truth, size = truth_and_size((body, x, case))
    found = backward(drawn, device, DiagCurvature(), GGNMP())
    assert close(gather(found, "diag_curvature"), truth.diagonal(), size)
    check_products(found, "ggnmp", truth, size)
    case.options["pd_fix"] = "psd"
    case.z = body.cpu()(x).detach()
    truth, size = truth_and_size((body, x, case))
    found = backward(drawn, device, DiagGGNExact(), SqrtGGNExact(), KFLR())
    assert close(gather(found, "diag_ggn_exact"), truth.diagonal(), size)
    root = torch.cat([p.sqrt_ggn_exact.flatten(2).flatten(0, 1) for p in found.parameters()], dim=1).cpu()
    assert close(root.T @ root, truth, size)
    count = body.bias.numel()
    assert close(body.bias.kflr[0].cpu(), truth[-count:, -count:], size)


def test_kfra_averages_over_the_jacobians_of_a_normalisation_layer(device: str) -> None:
    torch.manual_seed(0)
    layer = extend(cc.L2Norm())
    z, mat = torch.randn(5, 3, device=device).double(), torch.randn(3, 3, device=device).double()
    layer(z)
    jacobians = [torch.func.jacrev(layer.forward)(point) for point in z]
    truth = sum(jacobian.T @ mat @ jacobian for jacobian in jacobians) / len(z)
    found = derivatives.L2NormDerivatives().ea_jac_t_mat_jac_prod(layer, None, None, mat)
    assert close(found, truth, float(truth.abs().max()))


@each("distance", ["arccos", "euclidean"])
def test_a_normalisation_layer_with_the_other_distance_is_refused(distance: str, device: str) -> None:
    drawn = fixed("normalised", distance=distance)
    for extension in (DiagGGNExact, DiagCurvature, GGNMP, KFRA):
        if distance == "euclidean":
            backward(drawn, device, extension())
            continue
        with pytest.raises(cc.UnsupportedError, match="ends in a normalisation"):
            backward(drawn, device, extension())


@each("kind", ["linear", "no bias", "smooth", "normalised", "normalised inside"])
def test_the_diagonal_of_the_hessian_of_a_loss_without_pairs(kind: str, device: str) -> None:
    """Of every point too, and of the number that ``backward()`` is called on: the layers' part has the same factor."""
    torch.manual_seed(0)
    model, x, labels = build(kind, 3).to(device), torch.randn(5, INPUTS, device=device).double(), torch.arange(5) % 3
    proxies = torch.randn(3, model(x).shape[1], dtype=torch.float64, device=device)
    loss = cc.ProxyLoss(proxies, scale=3.0, pd_fix="full")
    points = zip(x.split(1), labels.split(1), strict=True)
    scaled = [hessian_of(lambda z, y=y: -2.5 * loss(z, y), model, point) / 5 for point, y in points]
    extend(model), extend(loss)
    with backpack(DiagHessian(), BatchDiagHessian()):
        (-2.5 * loss(model(x), labels)).backward()
    batch = torch.cat([p.diag_h_batch.flatten(1) for p in model.parameters()], dim=1)
    assert close(batch, torch.stack(scaled).diagonal(dim1=1, dim2=2))
    assert close(gather(model, "diag_h"), sum(scaled).diagonal().cpu())


@each("distance, fix", [("arccos", "fixed"), ("arccos", "psd"), ("arccos", "positive"), ("euclidean", "full")])
def test_options_that_change_the_hessian_are_refused_where_it_is_wanted(distance: str, fix: str, device: str) -> None:
    drawn = fixed("no bias", distance=distance, pd_fix=fix)
    with pytest.raises(cc.UnsupportedError, match=r"Hessian of the loss.*pd_fix='full'.*DiagCurvature\(\)"):
        backward(drawn, device, HMP())


@each("fix", ["fixed", "psd", "full"])
def test_the_diagonal_of_the_hessian_of_pairs_is_refused(fix: str, device: str) -> None:
    for extension in (DiagHessian, BatchDiagHessian):
        with pytest.raises(cc.UnsupportedError, match=r"couples the points.*HMP\(\).*DiagCurvature\(\)"):
            backward(fixed("relu", pd_fix=fix), device, extension())
    with pytest.raises(cc.UnsupportedError, match=r"convex in the outputs.*GGNMP\(\)"):
        backward(fixed("relu", pd_fix=fix), device, PCHMP())


SQUARE_ROOTS = (DiagGGNExact, DiagGGNMC, BatchDiagGGNExact, BatchDiagGGNMC, SqrtGGNExact, SqrtGGNMC, KFAC, KFLR)


@each("fix", ["fixed", "positive", "full"])
def test_square_roots_that_do_not_exist_are_refused(fix: str, device: str) -> None:
    drawn = fixed("relu", pd_fix=fix)
    for extension in SQUARE_ROOTS + ((KFRA,) if fix != "fixed" else ()):
        with pytest.raises(cc.UnsupportedError, match=r"DiagCurvature\(\).*pd_fix='psd'") as caught:
            backward(drawn, device, extension())
        assert ("indefinite" in str(caught.value)) == (fix == "fixed")
