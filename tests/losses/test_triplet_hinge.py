"""The triplet loss against a loop over triplets, autograd and pytorch-metric-learning."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from pytorch_metric_learning import distances, losses
from row_cases import (
    Towers,
    check_hessian,
    check_products,
    check_same,
    check_towers,
    cosines,
    counted,
    numbers,
    towers,
)
from strategies import Case, cases, close
from tables import each

import contrastive_curvature as cc
from contrastive_curvature.losses import triplet_hinge
from contrastive_curvature.losses.triplet_hinge import TripletLoss

pytestmark = pytest.mark.parametrize("device", DEVICES)

# No tie at any of them where cosines are 1 and -1, as in one dimension.
margins = st.sampled_from((0.05, 0.2, 1.3, 9.0))
reductions = st.sampled_from(("mean", "sum"))


def triplets(case: Case) -> list[tuple[int, int, int, float]]:
    """Anchor, positive, negative, and how often."""
    if isinstance(case.pairs, tuple) and len(case.pairs) == 3:
        listed = zip(*(part.tolist() for part in case.pairs), strict=True)
        return [(a, p, n, 1.0) for a, p, n in listed if a not in (p, n)]
    positive, negative = counted(case)
    points = range(len(case.z))
    every = [(a, p, n, float(positive[a, p] * negative[a, n])) for a in points for p in points for n in points]
    return [triplet for triplet in every if triplet[3]]


def times(case: Case) -> float:
    """How many triplets there are."""
    return 1 + sum(weight for *_, weight in triplets(case))


@given(case=cases(), margin=margins, reduction=reductions)
def test_value_is_a_sum_over_triplets(case: Case, margin: float, reduction: str, device: str) -> None:
    loss, moved, s = TripletLoss(margin, reduction), case.to(device), cosines(case.z)
    truth = active = 0.0
    for a, p, n, weight in triplets(case):
        cost = max(0.0, float(2 * s[a, n] - 2 * s[a, p] + margin))
        truth, active = truth + weight * cost, active + weight * (cost > 0)
    if reduction == "mean":
        truth /= max(active, 1.0)
    scale = 1.0 if reduction == "mean" else times(case)
    assert float(loss(moved.z, **moved.given)) == pytest.approx(truth, rel=1e-12, abs=1e-13 * (1 + margin) * scale)


@given(case=cases(), margin=margins, reduction=reductions)
def test_hessian_is_that_of_autograd(case: Case, margin: float, reduction: str, device: str) -> None:
    size = 1.0 if reduction == "mean" else times(case)
    check_hessian(TripletLoss(margin, reduction), case, device, size * (1 + margin))


@given(case=cases(), margin=margins, fix=st.sampled_from(("full", "positive")), seed=st.integers(0, 99))
def test_products_and_cross_blocks_agree_with_dense(
    case: Case, margin: float, fix: str, seed: int, device: str
) -> None:
    check_products(TripletLoss(margin, pd_fix=fix), case, device, 1.0, seed)


@given(case=cases(), margin=margins)
def test_positive_fix_keeps_the_pairs_that_attract(case: Case, margin: float, device: str) -> None:
    moved = case.to(device)
    full, positive = (
        TripletLoss(margin, pd_fix=fix).output_hessian(moved.z, moved.labels, pairs=moved.pairs).derivatives.dense()[0]
        for fix in ("full", "positive")
    )
    assert torch.equal(positive, full.clamp(min=0))


@given(drawn=towers(min_dim=2), margin=margins)
def test_two_towers(drawn: Towers, margin: float, device: str) -> None:
    check_towers(lambda **o: TripletLoss(margin, **o), drawn, device, 1 + margin)


@pytest.mark.parametrize("margin", [0.0, 0.05, 0.2, 1.5])
def test_same_as_pytorch_metric_learning(margin: float, device: str) -> None:
    """With the squared distance of unit vectors and its default reducer, the mean over triplets above zero."""
    other = losses.TripletMarginLoss(margin, distance=distances.LpDistance(power=2))
    for seed in range(5):
        z = numbers(seed, 12, 4).to(device).requires_grad_()
        labels = (torch.arange(12) % (2 + seed)).to(device)
        check_same(TripletLoss(margin)(z, labels), other(z, labels), z)
        chosen = tuple(torch.tensor(part, device=device) for part in ([0, 1, 5, 5], [3, 2, 4, 6], [1, 0, 9, 9]))
        check_same(TripletLoss(margin)(z, pairs=chosen), other(z, labels, chosen), z)


def test_given_triplets_are_no_others(device: str) -> None:
    """Two triplets of one anchor, and not the four that their pairs make."""
    z = numbers(2, 5, 3).to(device)
    pairs = tuple(torch.tensor(part, device=device) for part in ([0, 0], [1, 2], [3, 4]))
    s = cosines(z)
    truth = (2 * (s[0, 3] - s[0, 1]) + 3).relu() + (2 * (s[0, 4] - s[0, 2]) + 3).relu()
    found = TripletLoss(3.0, "sum")(z, pairs=pairs)
    assert close(found.reshape(1), truth.reshape(1), tolerance=1e-14)
    hessian = TripletLoss(9.0, "sum", pd_fix="full").output_hessian(z, pairs=pairs)
    y = torch.zeros(5, 5, dtype=torch.float64, device=device)
    y[0, 1] = y[0, 2] = 2
    y[0, 3] = y[0, 4] = -2
    assert torch.equal(hessian.derivatives.dense()[0], y + y.T)
    assert (hessian.derivatives.anchors, hessian.derivatives.skipped) == (1, 0)


def test_both_ends_of_a_triplet_agree_on_whether_it_is_active(device: str) -> None:
    """Where ``s_n = s_p - m / 2`` up to rounding, too: the weights of a row sum to zero."""
    loss = TripletLoss(0.2)
    generator = torch.Generator().manual_seed(0)
    s = (torch.randint(-10, 11, (64, 40), generator=generator, dtype=torch.float64) / 10).to(device)
    positive = (torch.rand(64, 40, generator=generator) < 0.4).double().to(device)
    statistics = loss._statistics(s, positive, 1 - positive)
    first = loss._terms(s, positive, 1 - positive, statistics).first
    assert not first.sum(1).any()
    assert torch.equal(loss._counts_at(s, positive, 1 - positive), (first * (1 - positive)).sum(1) / 2)


def test_candidates_in_parts(device: str) -> None:
    """Derivatives of some candidates follow from the statistics of all."""
    loss, s = TripletLoss(0.5), numbers(0, 6, 9).clamp(-1, 1).to(device)
    positive = (numbers(1, 6, 9) > 0).double().to(device)
    negative = 0.3 * (1 - positive)
    statistics = loss._statistics(s, positive, negative)
    whole = loss._terms(s, positive, negative, statistics).first
    for part in (slice(0, 4), slice(4, 9)):
        some = loss._terms(s[:, part], positive[:, part], negative[:, part], statistics).first
        assert torch.equal(some, whole[:, part])


def test_nothing_is_active_and_nothing_is_listed(device: str) -> None:
    z = torch.eye(4, dtype=torch.float64, device=device)[[0, 0, 1, 1]].requires_grad_()
    labels = torch.tensor([0, 0, 1, 1], device=device)
    none = tuple(torch.zeros(0, dtype=torch.int64, device=device) for _ in range(3))
    for chosen in ({"labels": labels}, {"labels": torch.arange(4, device=device)}, {"pairs": none}):
        loss = TripletLoss()
        value = loss(z, **chosen)
        assert float(value.detach()) == 0
        assert not torch.autograd.grad(value, z)[0].any()
        assert not loss.output_hessian(z.detach(), **chosen).dense().any()
    # They have triplets, so they are not skipped, although none of these is active.
    assert loss.output_hessian(z.detach(), labels).derivatives.anchors == 4


def test_second_order_part_is_refused(device: str) -> None:
    z, labels = numbers(0, 4, 3).to(device), torch.tensor([0, 0, 1, 1], device=device)
    with pytest.raises(cc.UnsupportedError, match=r"pd_fix='ggn': TripletLoss is piecewise linear"):
        TripletLoss(pd_fix="ggn")
    with pytest.raises(cc.UnsupportedError, match=r"pd_fix='ggn': TripletLoss is piecewise linear"):
        TripletLoss().output_hessian(z, labels, pd_fix="ggn")


def test_too_many_pairs_are_refused(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(triplet_hinge, "_MOST_PAIRS", 15)
    z, labels = numbers(0, 4, 3).to(device), torch.tensor([0, 0, 1, 1], device=device)
    assert bool(TripletLoss()(z, labels).isfinite())
    with pytest.raises(cc.UnsupportedError, match=r"4 anchors with 4 candidates.*smaller batches"):
        TripletLoss().output_hessian(z, labels)


@each(
    "options, name",
    [
        ({"margin": -0.1}, "margin"),
        ({"margin": math.nan}, "margin"),
        ({"margin": "0.2"}, "margin"),
        ({"margin": True}, "margin"),
        ({"reduction": "mean_all"}, "reduction"),
        ({"directions": "ab"}, "directions"),
    ],
)
def test_options(options: dict[str, Any], name: str, device: str) -> None:
    del device
    with pytest.raises(cc.InputError, match=f"^{name}: "):
        TripletLoss(**options)


@each("wrong", [[[0], [1], [7]], [[0, 1], [1], [2]], [[0.0], [1.0], [2.0]]])
def test_wrong_triplets(wrong: list[list[float]], device: str) -> None:
    z = numbers(0, 4, 3).to(device)
    with pytest.raises(cc.InputError, match="pairs"):
        TripletLoss()(z, pairs=tuple(torch.tensor(part, device=device) for part in wrong))
