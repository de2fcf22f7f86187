"""The curvature of each tower and of both together is exact, against autograd in float64."""

from typing import Any

import pytest
import torch
from strategies import close
from tables import covering
from torch import Tensor
from tower_cases import (
    FIXES,
    LOSSES,
    batches,
    data_loss,
    encoders,
    jacobian,
    joint_hessian,
    joint_hessians,
    numbers,
    posterior,
    pulled_back,
)

import contrastive_curvature as cc

# Of few points that hardly repel each other, and of factors that leave cross terms out.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def fitted(*args: Any, data: Any, **kwargs: Any) -> Any:
    la = posterior(*args, **kwargs)
    la.fit(data)
    return la


@covering(2, labelled=[False, True], fix=FIXES, name=LOSSES)
def test_blocks_of_both_towers(name: str, fix: str, labelled: bool, device: str) -> None:
    """Diagonal and matrix, of the last layer and of all parameters, over several batches, for both distances."""
    a, b = encoders(device)
    data = batches(device, labelled)
    for distance in ("arccos",) if labelled else ("arccos", "euclidean"):
        hessians = joint_hessians(name, a, b, data, fix, distance=distance)
        for weights in ("all", "last_layer"):
            loss = LOSSES[name](pd_fix=fix, distance=distance)
            full, diag = (fitted(a, b, weights, structure, loss, data=data) for structure in ("full", "diag"))
            for tower, expected in zip("ab", pulled_back(hessians, a, b, data, weights), strict=False):
                size = float(expected.abs().max())
                assert close(getattr(full, tower).H_raw, expected, 1e-3, 1e-11), (tower, distance, weights)
                assert close(getattr(diag, tower).H_raw, expected.diagonal(), size, 1e-11), (tower, distance, weights)


@pytest.mark.parametrize("directions", ["a", "b"])
@pytest.mark.parametrize("name", LOSSES)
def test_one_direction(name: str, directions: str, device: str) -> None:
    a, b = encoders(device)
    data = batches(device)
    la = fitted(a, b, "all", "full", LOSSES[name](directions=directions, pd_fix="ggn"), data=data)
    of_a, of_b, _ = pulled_back(joint_hessians(name, a, b, data, "ggn", directions=directions), a, b, data, "all")
    assert close(la.a.H_raw, of_a, tolerance=1e-11)
    assert close(la.b.H_raw, of_b, tolerance=1e-11)


@pytest.mark.parametrize("name", LOSSES)
def test_either_tower_has_half_of_the_loss(name: str, device: str) -> None:
    a, b = encoders(device)
    data = batches(device, labelled=True)
    la = fitted(a, b, "last_layer", "diag", LOSSES[name](), data=data)
    total = 0.0
    for x_a, x_b, (of_a, of_b) in data:
        u, v = (torch.nn.functional.normalize(z) for z in (a(x_a), b(x_b)))
        total += float(data_loss(name, u @ v.T, of_a.unsqueeze(1) == of_b, "both").detach())
    assert la.loss == pytest.approx(total, rel=1e-12)
    assert float(la.a.loss) == float(la.b.loss)
    assert 0 < la.a.cost == la.b.cost <= float(la.a.loss)
    assert (la.a.n_data, la.b.n_data) == (6, 8)


@pytest.mark.parametrize("fix", ["ggn", "fixed"])
def test_kronecker_factors_of_the_last_layer(fix: str, device: str) -> None:
    """The curvature factor is the sum of the blocks of all points, the input factor the mean of the features."""
    a, b = encoders(device)
    data, loss = batches(device), LOSSES["infonce"](pd_fix=fix)
    la, small = (fitted(a, b, "last_layer", "kron", loss, rank=rank, data=data) for rank in ("full", 3))
    # The bias of tower a sees every block once.
    hessians = joint_hessians("infonce", a, b, data, "ggn_fixed" if fix == "ggn" else fix)
    alone = pulled_back(hessians, a, b, data, "last_layer")[0]
    features = torch.cat([a[:2](x) for x, _ in data]).detach()
    (g, moment), (of_bias,) = la.a.H_raw
    assert close(of_bias, alone[-3:, -3:], tolerance=1e-11)
    assert close(g, alone[-3:, -3:], tolerance=1e-11)
    assert close(moment, features.T @ features / len(features), tolerance=1e-12)
    assert close(*(one.a.posterior.fitted.clamped.diagonal() for one in (small, la)), tolerance=1e-9)


@covering(
    1,
    loss=[
        cc.MultiSimilarityLoss(reduction="sum", pd_fix="full"),
        cc.TripletLoss(0.5, reduction="sum", pd_fix="full"),
        cc.InfoNCELoss(0.05, reduction="sum", pd_fix="full"),
    ],
    shared=[False, True],
)
def test_other_losses(loss: Any, shared: bool, device: str) -> None:
    """The Hessian of the loss between the towers by autograd, pulled back."""
    a, b = encoders(device)
    b = a if shared else b
    data: Any = batches(device, labelled=True, widths=(4, 4) if shared else (4, 2))
    hessians = []
    for x_a, x_b, y in data:
        z, first = torch.cat([a(x_a), b(x_b)]).detach(), len(x_a)

        def value(z: Tensor, first: int = first, y: Any = y) -> Tensor:
            return loss.between(z[:first], z[first:], y)

        hessians.append(torch.autograd.functional.hessian(value, z).reshape(z.numel(), -1))
    la = fitted(a, b, "all", "full", loss, data=data)
    of_a, of_b, between = pulled_back(hessians, a, b, data, "all")
    assert bool(of_a.any())
    if shared:
        assert close(la.a.H_raw, of_a + of_b + between + between.T, tolerance=1e-9)
    else:
        assert close(la.a.H_raw, of_a, tolerance=1e-9)
        assert close(la.b.H_raw, of_b, tolerance=1e-9)
        v = numbers(5, len(of_a)).to(device)
        found = la.curvature_product(data, v, torch.zeros_like(of_b[0]))
        assert close(torch.cat(found), torch.cat([of_a @ v, between.T @ v]), tolerance=1e-9)


@covering(2, weights=["all", "last_layer"], fix=FIXES, name=LOSSES)
def test_product_has_the_blocks_between_the_towers(name: str, fix: str, weights: str, device: str) -> None:
    a, b = encoders(device)
    data = batches(device, labelled=True)
    la = fitted(a, b, weights, "diag", LOSSES[name](pd_fix=fix), data=data)
    of_a, of_b, between = pulled_back(joint_hessians(name, a, b, data, fix), a, b, data, weights)
    whole = torch.cat([torch.cat([of_a, between], 1), torch.cat([between.T, of_b], 1)])
    v_a, v_b = numbers(3, len(of_a)).to(device), numbers(4, len(of_b)).to(device)
    found = la.curvature_product(data, v_a, v_b)
    assert close(torch.cat(found), whole @ torch.cat([v_a, v_b]), float(whole.abs().max()), 1e-11)
    assert bool(between.any()) == (fix in ("positive", "full", "ggn"))


@covering(1, weights=["all", "last_layer"], fix=["full", "ggn", "fixed"], name=LOSSES)
def test_one_module_for_both(name: str, fix: str, weights: str, device: str) -> None:
    """One set of parameters, with all that couples the two kinds of inputs."""
    one, _ = encoders(device)
    data = batches(device, labelled=True, widths=(4, 4))
    full = fitted(one, one, weights, "full", LOSSES[name](pd_fix=fix), data=data)
    diag = fitted(one, one, weights, "diag", LOSSES[name](pd_fix=fix), data=data)
    truth: Any = 0.0
    for x_a, x_b, (of_a, of_b) in data:
        h = joint_hessian(name, one(x_a).detach(), one(x_b).detach(), of_a.unsqueeze(1) == of_b, fix)
        j = jacobian(one, torch.cat([x_a, x_b]), weights)
        truth = truth + j.T @ h @ j
    assert full.shared
    assert full.a is full.b
    assert full.a.n_data == 14
    assert close(full.a.H_raw, truth, tolerance=1e-11)
    assert close(diag.a.H_raw, truth.diagonal(), float(truth.abs().max()), 1e-11)
    v = numbers(6, len(truth)).to(device)
    (found,) = full.curvature_product(data, v)
    assert close(found, truth @ v, tolerance=1e-11)


def test_shared_module_takes_inputs_of_two_lengths(device: str) -> None:
    """Queries are shorter than documents; the last layer does not need them in one batch."""

    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 3)

        def forward(self, x: dict[str, Tensor]) -> Tensor:
            return self.out(self.words(x["input_ids"]).mean(1))

    torch.manual_seed(0)
    model = Mean().double().to(device)
    queries = {"input_ids": torch.arange(12, device=device).view(4, 3) % 9}
    documents = {"input_ids": torch.arange(28, device=device).view(4, 7) % 8}
    la = fitted(model, model, "last_layer", "diag", LOSSES["infonce"](), data=[(queries, documents)])
    assert la.a(queries).raw_mean.shape == la.b(documents).raw_mean.shape == (4, 3)
    with pytest.raises(cc.InputError, match="pad or crop them to one shape"):
        fitted(model, model, "all", "diag", LOSSES["infonce"](), data=[(queries, documents)])
