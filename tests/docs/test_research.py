"""The page *Research with it* runs, and each of its five results is that of autograd or of a dense matrix."""

from pathlib import Path
from typing import Any

import pytest
import torch
from page_code import run_blocks, sections
from torch import Tensor
from torch.nn.utils import parameters_to_vector

import contrastive_curvature as cc
from contrastive_curvature.testing import dense_jacobian

PAGE = Path(__file__).resolve().parents[2] / "docs" / "research.md"

Page = dict[str, Any]


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-8) -> bool:
    return torch.allclose(found, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def by_autograd(encoder: Any, x: Tensor, y: Tensor, loss: Any) -> Tensor:
    """The Gauss-Newton matrix of all pairs, with the whole Hessian in the outputs."""
    z, jacobian = encoder(x).detach(), dense_jacobian(encoder, x)
    hessian = torch.func.hessian(lambda z: loss(z, y))(z).reshape(z.numel(), -1)
    return jacobian.T @ hessian @ jacobian


def check_margin(page: Page) -> None:
    numbers = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (4.0, -2.0)]
    encoder, x, y = page["encoder"], page["x"], page["y"]
    loss = cc.LogisticLoss(*numbers, normalization="sum")
    weights, h = parameters_to_vector(encoder.parameters()).detach(), by_autograd(encoder, x, y, loss)
    ratio = (h.diagonal().clamp(min=0) / 0.5 + 1).log().sum()
    evidence = -loss(encoder(x).detach(), y) / 0.5 - (ratio + weights @ weights) / 2
    found = torch.stack([page["scale"].grad, page["bias"].grad])
    assert close(found, torch.stack(torch.autograd.grad(evidence, numbers)))


def check_density(page: Page) -> None:
    values = torch.linalg.eigvalsh(by_autograd(page["encoder"], page["x"], page["y"], page["loss"]))
    grid, share = page["grid"], page["density"].cumsum(0) / page["density"].sum()
    below = (values[:, None] <= grid).double().mean(0)
    near = (grid[:, None] - values).abs().amin(1) < 0.01 * values.max()
    # Four random starts weigh 418 eigenvalues; inside a bump the share rises.
    assert float((share - below)[~near].abs().max()) < 0.05
    assert float(grid[0]) < float(values[0])
    assert float(grid[-1]) > float(values[-1])


def check_sharpness(page: Page) -> None:
    h = by_autograd(page["later"], page["x"], page["y"], page["loss"])
    assert float(page["trace"]) == pytest.approx(float(h.trace()), rel=1e-9)
    assert page["sharpness"].item() == pytest.approx(float(torch.linalg.eigvalsh(h)[-1]), rel=1e-9)


def check_step(page: Page) -> None:
    encoder, x, y, gradient = page["encoder"], page["x"], page["y"], page["flat"]
    jacobian, blocks = dense_jacobian(encoder, x), []
    exact = torch.func.hessian(lambda z: page["loss"](z, y))(encoder(x).detach())
    for k in range(len(x)):
        values, vectors = torch.linalg.eigh(exact[k, :, k])
        blocks.append((vectors * values.clamp(min=0)) @ vectors.T)
    eye = 100 * torch.eye(len(gradient), dtype=torch.float64)
    h = jacobian.T @ torch.block_diag(*blocks) @ jacobian
    assert close(page["exact"], torch.linalg.solve(h + eye, gradient), 1e-6)
    factors: Any = cc.ggn(encoder, x, y, loss=page["psd"], structure="kron")
    kron = torch.block_diag(*[torch.kron(*f) if len(f) == 2 else f[0] for f in factors])
    assert close(page["step"], torch.linalg.solve(kron + eye, gradient))
    losses = [page["after"](step) for step in (page["exact"], page["step"])]
    assert losses[0] < losses[1] < page["sgd"] < page["after"](0 * gradient)


def check_continual(page: Page) -> None:
    later, earlier = page["la"], page["first_posterior"]
    parts = [
        cc.ggn(encoder, page["x"][rows], page["y"][rows], loss=page["psd"], structure="full", clamp=False)
        for encoder, rows in ((page["learned"], page["first"]), (page["both"], page["second"]))
    ]
    weights = [parameters_to_vector(page[name].parameters()).detach() for name in ("learned", "both")]
    apart = weights[1] - weights[0]
    penalty = apart @ parts[0] @ apart / 2 + 1e-3 * apart @ apart / 2
    assert float(-earlier.log_prob(weights[1], normalized=False)) == pytest.approx(float(penalty), rel=1e-6)
    assert close(later.H, parts[0] + parts[1])
    old, without, kept = (float(page[name]) for name in ("old", "without", "kept"))
    assert old < kept < (old + without) / 1.5


CHECKS = {
    "": lambda _: None,
    "Choose the margin by the marginal likelihood": check_margin,
    "The spectral density during training": check_density,
    "Trace and sharpness of every epoch": check_sharpness,
    "A natural-gradient step": check_step,
    "Continual learning": check_continual,
}


@pytest.mark.filterwarnings("ignore:hessian_structure='kron")
def test_every_result_of_the_page_is_that_of_autograd(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: Page = {}
    found = sections(PAGE)
    assert list(found) == list(CHECKS)
    for title, blocks in found.items():
        run_blocks(PAGE, blocks, capsys, namespace)
        CHECKS[title](namespace)
        for _, code in blocks[1:]:
            assert code.count("\n") < 14, "a recipe is short"
