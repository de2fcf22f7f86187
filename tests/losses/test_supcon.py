"""The supervised contrastive loss against a loop over pairs, autograd and pytorch-metric-learning."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from laplace import Laplace
from pytorch_metric_learning import losses
from row_cases import (
    TEMPERATURES,
    Towers,
    check_ggn_is_psd,
    check_hessian,
    check_products,
    check_same,
    check_towers,
    numbers,
    slow_value,
    towers,
)
from strategies import Case, cases, close
from tables import each
from torch import nn
from torch.nn import functional as F

import contrastive_curvature as cc
from contrastive_curvature.losses.supcon import SupConLoss

pytestmark = pytest.mark.parametrize("device", DEVICES)

temperatures = st.sampled_from(TEMPERATURES)
reductions = st.sampled_from(("mean", "sum"))


def size(tau: float) -> float:
    """Of the derivatives in the cosines."""
    return 1 / tau + 1 / tau**2


def of_anchor(tau: float) -> Any:
    """By hand: a positive stands once in the denominator, a negative as often as it counts."""

    def value(s: list[float], positive: list[float], negative: list[float]) -> tuple[float, float]:
        total = 0.0
        for a, times in zip(s, positive, strict=True):
            if times:
                parts = zip(s, positive, negative, strict=True)
                denominator = sum((1.0 if p else n) * math.exp((b - a) / tau) for b, p, n in parts)
                total += times / sum(positive) * math.log(denominator)
        return total, float(any(positive))

    return value


@given(case=cases(), tau=temperatures, reduction=reductions)
def test_value_is_a_sum_over_anchors(case: Case, tau: float, reduction: str, device: str) -> None:
    loss, moved = SupConLoss(tau, reduction), case.to(device)
    truth = slow_value(case, of_anchor(tau), reduction)
    assert float(loss(moved.z, **moved.given)) == pytest.approx(truth, rel=1e-11, abs=1e-13 * (1 + 1 / tau))


@given(
    case=cases(), tau=temperatures, reduction=reductions, fix=st.sampled_from(("full", "ggn")), seed=st.integers(0, 99)
)
def test_derivatives_are_those_of_autograd(
    case: Case, tau: float, reduction: str, fix: str, seed: int, device: str
) -> None:
    check_hessian(SupConLoss(tau, reduction), case, device, size(tau))
    check_products(SupConLoss(tau, pd_fix=fix), case, device, size(tau), seed)
    check_ggn_is_psd(SupConLoss(tau), case, device, size(tau))


@given(drawn=towers(), tau=temperatures)
def test_two_towers(drawn: Towers, tau: float, device: str) -> None:
    check_towers(lambda **o: SupConLoss(tau, **o), drawn, device, size(tau))


@pytest.mark.parametrize("tau", [0.05, 0.1, 1.0])
def test_same_as_pytorch_metric_learning(tau: float, device: str) -> None:
    """Values and gradients, in one tower and in one direction of two.

    It adds the smallest normal number to the number of positives, of no effect here. It gives zero for a batch without
    negatives, where ours tells the positives apart from each other, and leaves anchors of zero loss out of the mean.
    """
    for seed in range(5):
        z = numbers(seed, 12, 4).to(device).requires_grad_()
        labels = (torch.arange(12) % (2 + seed)).to(device)
        check_same(SupConLoss(tau)(z, labels), losses.SupConLoss(tau)(z, labels), z)
        other, of_other = numbers(seed + 9, 8, 4).to(device), (torch.arange(8) % 3).to(device)
        theirs = losses.SupConLoss(tau)(z, labels, ref_emb=other, ref_labels=of_other)
        check_same(SupConLoss(tau, directions="a").between(z, other, (labels, of_other)), theirs, z)
    alone = torch.zeros(12, dtype=torch.int64, device=device)
    assert float(losses.SupConLoss(tau)(z, alone).detach()) == 0
    assert float(SupConLoss(tau)(z, alone).detach()) > 0


@pytest.mark.parametrize("tau", [0.01, 0.07, 1.0])
def test_one_positive_makes_a_cross_entropy(tau: float, device: str) -> None:
    a, b = numbers(0, 6, 3).to(device), numbers(1, 6, 3).to(device)
    logits, target = F.normalize(a) @ F.normalize(b).T / tau, torch.arange(6, device=device)
    one, other = F.cross_entropy(logits, target), F.cross_entropy(logits.T, target)
    for directions, truth in (("a", one), ("b", other), ("both", (one + other) / 2)):
        found = SupConLoss(tau, directions=directions).between(a, b)
        assert close(found.reshape(1), truth.reshape(1), tolerance=1e-13)


def test_anchors_without_positives_are_left_out(device: str) -> None:
    z = numbers(0, 5, 3).to(device)
    labels = torch.tensor([0, 0, 1, 2, 3], device=device)
    mean, total = (SupConLoss(reduction=kind)(z, labels) for kind in ("mean", "sum"))
    assert float(mean) == pytest.approx(float(total) / 2, rel=1e-14)
    derivatives = SupConLoss().output_hessian(z, labels).derivatives
    assert (derivatives.anchors, derivatives.skipped) == (2, 3)
    alone = z.clone().requires_grad_()
    value = SupConLoss()(alone, torch.arange(5, device=device))
    assert float(value.detach()) == 0
    assert not torch.autograd.grad(value, alone)[0].any()
    assert not SupConLoss().output_hessian(z, torch.arange(5, device=device)).dense().any()


@pytest.mark.parametrize("fix", ["ggn", "full"])
@pytest.mark.parametrize("pull", [0.0, 0.3])
def test_single_precision_at_a_low_temperature(fix: str, pull: float, device: str) -> None:
    labels = (torch.arange(24) % 6).to(device)
    z = (numbers(0, 24, 5).to(device) + pull * numbers(1, 6, 5).to(device)[labels]).float()
    loss = SupConLoss(0.005, pd_fix=fix)
    single, double = (loss.output_hessian(x, labels).dense().double() for x in (z, z.double()))
    # A logit is 200 cosines, each wrong by some 1e-7.
    assert close(single, double, tolerance=5e-4)


def test_separated_positives_lose_no_digits(device: str) -> None:
    """All weights are of the size of 1e-6 where the only positive has nearly all of the softmax."""
    labels = (torch.arange(24) % 12).to(device)
    z = (numbers(0, 24, 16) / 2 + 2 * numbers(1, 12, 16)[labels.cpu()]).float().to(device)
    loss = SupConLoss(0.02, pd_fix="fixed")
    single, double = (loss.output_hessian(x, labels).dense().double() for x in (z, z.double()))
    assert float(double.abs().max()) < 1e-6
    # A logit is 50 cosines, each wrong by some 1e-7.
    assert close(single, double, tolerance=1e-4)


@each(
    "options, name",
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "0.1"}, "temperature"),
        ({"reduction": "none"}, "reduction"),
        ({"directions": "ab"}, "directions"),
    ],
)
def test_options(options: dict[str, Any], name: str, device: str) -> None:
    del device
    with pytest.raises(cc.InputError, match=f"^{name}: "):
        SupConLoss(**options)


def test_the_default_temperature_takes_the_loss_above_the_entropy_of_its_targets(device: str) -> None:
    torch.manual_seed(0)
    x, labels = numbers(0, 18, 4).to(device), torch.tensor([0] * 9 + [1] * 5 + [2] * 4, device=device)
    encoder = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().to(device)
    sizes = labels.bincount()[labels].double()
    for options in ({}, {"candidates": "dataset"}, {"candidates": "dataset", "negative_samples": 18}):
        kwargs = {"loss": SupConLoss(), **options}
        la: Any = Laplace(encoder, "contrastive", "last_layer", "diag", backend_kwargs=kwargs)
        la.fit([(x, labels)])
        la.optimize_prior_precision()
        assert float(la.loss - la.cost) == pytest.approx(float((sizes - 1).log().sum()), rel=1e-10)
        # The temperature divides the likelihood and the prior alike.
        gamma = float((la.H / (la.H + la.temperature * la.prior_precision)).sum())
        assert la.temperature == pytest.approx(2 * float(la.cost) / (len(x) + gamma), rel=1e-10)
