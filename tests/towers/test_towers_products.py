"""Products with the curvature of both towers together, and one module for both kinds of inputs."""

import warnings
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
    encoders,
    jacobian,
    joint_hessian,
    joint_hessians,
    numbers,
    posterior,
    pulled_back,
)

import contrastive_curvature as cc


def fitted(*args: Any, data: Any, **kwargs: Any) -> Any:
    la = posterior(*args, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la.fit(data)
    return la


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
