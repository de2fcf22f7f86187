"""The multi-similarity loss against a loop over candidates, autograd and pytorch-metric-learning."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from pytorch_metric_learning import losses
from row_cases import (
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

import contrastive_curvature as cc
from contrastive_curvature.losses.multisimilarity import MultiSimilarityLoss

pytestmark = pytest.mark.parametrize("device", DEVICES)

reductions = st.sampled_from(("mean", "sum"))
options = st.sampled_from(((2.0, 50.0, 0.5), (1.0, 1.0, -0.2), (20.0, 3.0, 1.0)))


def size(alpha: float, beta: float, base: float) -> float:
    """Of the derivatives in the cosines."""
    del base
    return 1 + alpha + beta


def of_anchor(alpha: float, beta: float, base: float) -> Any:
    """By hand."""

    def value(s: list[float], positive: list[float], negative: list[float]) -> tuple[float, float]:
        far = sum(p * math.exp(-alpha * (a - base)) for a, p in zip(s, positive, strict=True))
        near = sum(n * math.exp(beta * (a - base)) for a, n in zip(s, negative, strict=True))
        return math.log1p(far) / alpha + math.log1p(near) / beta, float(any(positive) or any(negative))

    return value


@given(case=cases(), chosen=options, reduction=reductions)
def test_value_is_a_sum_over_candidates(case: Case, chosen: Any, reduction: str, device: str) -> None:
    loss, moved = MultiSimilarityLoss(*chosen, reduction), case.to(device)
    truth = slow_value(case, of_anchor(*chosen), reduction)
    assert float(loss(moved.z, **moved.given)) == pytest.approx(truth, rel=1e-12, abs=1e-12)


@given(
    case=cases(), chosen=options, reduction=reductions, fix=st.sampled_from(("full", "ggn")), seed=st.integers(0, 99)
)
def test_derivatives_are_those_of_autograd(
    case: Case, chosen: Any, reduction: str, fix: str, seed: int, device: str
) -> None:
    check_hessian(MultiSimilarityLoss(*chosen, reduction), case, device, size(*chosen))
    check_products(MultiSimilarityLoss(*chosen, pd_fix=fix), case, device, size(*chosen), seed)
    check_ggn_is_psd(MultiSimilarityLoss(*chosen), case, device, size(*chosen))


@given(drawn=towers(), chosen=options)
def test_two_towers(drawn: Towers, chosen: Any, device: str) -> None:
    check_towers(lambda **o: MultiSimilarityLoss(*chosen, **o), drawn, device, size(*chosen))


@pytest.mark.parametrize("chosen", [(2.0, 50.0, 0.5), (1.0, 10.0, 0.0), (2.0, 40.0, 1.0)])
def test_same_as_pytorch_metric_learning(chosen: tuple[float, float, float], device: str) -> None:
    for seed in range(5):
        z = numbers(seed, 12, 4).to(device).requires_grad_()
        labels = (torch.arange(12) % (2 + seed)).to(device)
        theirs = losses.MultiSimilarityLoss(*chosen)(z, labels)
        check_same(MultiSimilarityLoss(*chosen)(z, labels), theirs, z)


def test_anchors_without_candidates_are_left_out(device: str) -> None:
    z = numbers(0, 5, 3).to(device)
    masks = torch.zeros(2, 5, 5, dtype=torch.bool, device=device)
    masks[0, 0, 1] = masks[0, 1, 0] = True
    mean, total = (MultiSimilarityLoss(reduction=kind)(z, pairs=tuple(masks)) for kind in ("mean", "sum"))
    assert float(mean) == pytest.approx(float(total) / 2, rel=1e-14)
    assert float(MultiSimilarityLoss()(z[:1], torch.zeros(1, dtype=torch.int64, device=device))) == 0


def test_single_precision(device: str) -> None:
    z, labels = numbers(0, 24, 5).to(device).float(), (torch.arange(24) % 6).to(device)
    single, double = (MultiSimilarityLoss().output_hessian(x, labels).dense().double() for x in (z, z.double()))
    assert close(single, double, tolerance=1e-5)


@each(
    "options, name",
    [
        ({"alpha": 0.0}, "alpha"),
        ({"beta": -1.0}, "beta"),
        ({"beta": math.nan}, "beta"),
        ({"alpha": "2"}, "alpha"),
        ({"base": math.inf}, "base"),
        ({"base": True}, "base"),
        ({"reduction": "none"}, "reduction"),
        ({"directions": "ab"}, "directions"),
    ],
)
def test_options(options: dict[str, Any], name: str, device: str) -> None:
    del device
    with pytest.raises(cc.InputError, match=f"^{name}: "):
        MultiSimilarityLoss(**options)
