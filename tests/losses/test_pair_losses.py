"""Every pair loss: its value by hand, and its output Hessian against autograd."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import check_cross_blocks, check_hessian, unit
from strategies import DISTANCES, NORMALIZATIONS, Case, cases

import contrastive_curvature as cc
from contrastive_curvature.testing import dense_output_hessian, list_pairs
from contrastive_curvature.testing.oracle import pair_weights


def logistic(scale: float, bias: float) -> Callable[[float, int], float]:
    """By hand, from the distance of a pair."""
    return lambda distance, sign: math.log1p(math.exp(-sign * (scale * (1 - distance**2 / 2) + bias)))


def contrastive(margin: float | None) -> Callable[[float, int], float]:
    def value(distance: float, sign: int) -> float:
        if sign > 0:
            return distance**2 / 2
        return -(distance**2) / 2 if margin is None else max(0.0, margin**2 - distance**2) / 2

    return value


def linear(margin: float | None) -> tuple[Any, Callable[[float, int], float]]:
    return lambda **o: cc.ContrastiveLoss(margin, **o), contrastive(margin)


def curved(scale: float, bias: float) -> tuple[Any, Callable[[float, int], float]]:
    return lambda **o: cc.LogisticLoss(scale, bias, **o), logistic(scale, bias)


CURVED = [curved(3.0, -1.0), curved(10.0, -5.0)]
LINEAR = [linear(margin) for margin in (None, 0.3, 0.9, 1.3, 2.0)]
FIXES = ("full", "fixed", "psd", "psd_parts", "positive", "ggn", "ggn_fixed")
shares = st.fixed_dictionaries(
    {
        "distance": st.sampled_from(DISTANCES),
        "negative_weight": st.sampled_from((0.0, 0.2, 0.5, 1.0)),
        "normalization": st.sampled_from(NORMALIZATIONS),
    }
)


def size_of(loss: cc.PairLoss, case: Case) -> float:
    """Size of the terms that may cancel in a Hessian."""
    y, c = cc.output_hessian(case.z, **case.given, loss=loss, pd_fix="full").derivatives.dense()
    total = y.abs().sum() + (0 if c is None else c.abs().sum())
    return float(total) / float(case.z.norm(dim=1).min()) ** 2


@given(case=cases(), kind=st.sampled_from((*CURVED, *LINEAR)), chosen=shares)
def test_value_is_a_sum_over_pairs(case: Case, kind: Any, chosen: dict[str, Any], device: str) -> None:
    make, by_hand = kind
    loss, moved, u = make(**chosen), case.to(device), unit(case.z)
    listed = list_pairs(len(case.z), case.labels, case.pairs)
    truth = size = 0.0
    for (i, j, sign), weight in pair_weights(listed, loss.negative_weight, str(loss.normalization)).items():
        each = abs(weight) * by_hand(float((u[i] - u[j]).norm()), sign)
        truth, size = truth + each, size + abs(each) + 4 * abs(weight)
    z = moved.z.requires_grad_()
    value = loss(z, **moved.given)
    cost = loss.output_hessian(moved.z.detach(), moved.labels, pairs=moved.pairs).loss_and_cost()
    for found in (value.detach(), cost[0]):
        assert abs(float(found) - truth) <= 1e-12 * size
    assert float(cost[1]) >= -1e-12 * size
    assert getattr(loss, "margin", 1) is None or float(cost[1]) == float(cost[0])
    (gradient,) = torch.autograd.grad(value, z)
    assert bool(gradient.isfinite().all())
    assert listed or not gradient.any()


@pytest.mark.parametrize("fix", FIXES)
@given(case=cases(), data=st.data(), chosen=shares, seed=st.integers(0, 999))
def test_output_hessian_equals_autograd(
    fix: str, case: Case, data: st.DataObject, chosen: dict[str, Any], seed: int, device: str
) -> None:
    make, _ = data.draw(st.sampled_from(CURVED if fix.startswith("ggn") else [*CURVED, *LINEAR]))
    loss, moved = make(**chosen, pd_fix=fix), case.to(device)
    truth, size = dense_output_hessian(case.z, **case.given, loss=loss), size_of(loss, case)
    found = cc.output_hessian(moved.z, **moved.given, loss=loss)
    check_hessian(found, truth, 1e-3 * size)
    check_cross_blocks(found, 10 * size, seed)


@pytest.mark.parametrize("negative_weight", [0.5, 0.0])
@pytest.mark.parametrize("distance", [1e-3, 1e-4, 1e-5])
def test_the_loss_of_close_positives_keeps_its_digits(distance: float, negative_weight: float, device: str) -> None:
    """Far below the rounding of 1 - s in float32."""
    labels = torch.arange(40) // 10
    z = (torch.eye(4, 8)[labels] + distance * torch.randn(40, 8, generator=torch.Generator().manual_seed(0))).to(device)
    positive = (labels.unsqueeze(1) == labels) & ~torch.eye(40, dtype=torch.bool)
    listed = (*positive.triu().nonzero().unbind(1), *(~positive).triu(1).nonzero().unbind(1))
    masks = positive.to(device), (~positive & ~torch.eye(40, dtype=torch.bool)).to(device)
    # Every point has as many positives as any other, so that all have the same share.
    gaps = (unit(z.double()).unsqueeze(1) - unit(z.double())).square().sum(2).cpu()
    truth = float((1 - negative_weight) * gaps[positive].sum() / 4 / 9)
    forms: list[dict[str, Any]] = [{"labels": labels.to(device)}, {"pairs": masks}]
    forms.append({"pairs": tuple(part.to(device) for part in listed)})
    for given_as in forms:
        for pd_fix in ("fixed", "positive"):
            loss = cc.ContrastiveLoss(0.7, negative_weight, pd_fix=pd_fix)
            found = loss.output_hessian(z, **given_as).loss_and_cost()
            assert [float(part) for part in found] == pytest.approx([truth] * 2, rel=1e-3), (list(given_as), pd_fix)


def test_a_fix_that_the_oracle_does_not_know_is_no_other_one(device: str) -> None:
    with pytest.raises(ValueError, match="pd_fix='psd_part'"):
        dense_output_hessian(torch.eye(3, device=device), torch.zeros(3), pd_fix="psd_part")
