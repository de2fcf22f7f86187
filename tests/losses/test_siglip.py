"""SigLIP's loss against a loop over pairs, autograd and torch's binary cross entropy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from row_cases import (
    Towers,
    check_ggn_is_psd,
    check_hessian,
    check_products,
    check_towers,
    numbers,
    slow_value,
    towers,
)
from strategies import Case, cases, close
from tables import each
from torch.nn import functional as F

import contrastive_curvature as cc
from contrastive_curvature.losses.siglip import SigLIPLoss

pytestmark = pytest.mark.parametrize("device", DEVICES)

reductions = st.sampled_from(("mean", "sum"))
options = st.sampled_from(((10.0, -10.0), (1.0, 0.3), (100.0, -50.0)))


def size(scale: float, bias: float) -> float:
    """Of the derivatives in the cosines."""
    del bias
    return scale + scale**2


def of_anchor(scale: float, bias: float) -> Any:
    """By hand: every pair by itself."""

    def softplus(x: float) -> float:
        return max(x, 0) + math.log1p(math.exp(-abs(x)))

    def value(s: list[float], positive: list[float], negative: list[float]) -> tuple[float, float]:
        total = 0.0
        for a, p, n in zip(s, positive, negative, strict=True):
            total += p * softplus(-scale * a - bias) + n * softplus(scale * a + bias)
        return total, float(any(p or n for p, n in zip(positive, negative, strict=True)))

    return value


@given(case=cases(), chosen=options, reduction=reductions)
def test_value_is_a_sum_over_candidates(case: Case, chosen: Any, reduction: str, device: str) -> None:
    loss, moved = SigLIPLoss(*chosen, reduction), case.to(device)
    truth = slow_value(case, of_anchor(*chosen), reduction)
    assert float(loss(moved.z, **moved.given)) == pytest.approx(truth, rel=1e-12, abs=1e-12)


@given(
    case=cases(), chosen=options, reduction=reductions, fix=st.sampled_from(("full", "ggn")), seed=st.integers(0, 99)
)
def test_derivatives_are_those_of_autograd(
    case: Case, chosen: Any, reduction: str, fix: str, seed: int, device: str
) -> None:
    check_hessian(SigLIPLoss(*chosen, reduction), case, device, size(*chosen))
    check_products(SigLIPLoss(*chosen, pd_fix=fix), case, device, size(*chosen), seed)
    check_ggn_is_psd(SigLIPLoss(*chosen), case, device, size(*chosen))


@given(drawn=towers(), chosen=options)
def test_two_towers(drawn: Towers, chosen: Any, device: str) -> None:
    check_towers(lambda **o: SigLIPLoss(*chosen, **o), drawn, device, size(*chosen))


@pytest.mark.parametrize("directions", ["both", "a", "b"])
def test_two_towers_are_a_binary_cross_entropy(directions: str, device: str) -> None:
    """Algorithm 1 of the paper: divided by the size of the batch."""
    a, b = numbers(0, 6, 3).to(device), numbers(1, 6, 3).to(device)
    logits = 10 * F.normalize(a) @ F.normalize(b).T - 10
    eye = torch.eye(6, dtype=torch.float64, device=device)
    published = -F.logsigmoid((2 * eye - 1) * logits).sum() / 6
    found = SigLIPLoss(directions=directions).between(a, b)
    assert close(found.reshape(1), published.reshape(1), tolerance=1e-14)
    torchs = 6 * F.binary_cross_entropy_with_logits(logits, eye)
    assert close(found.reshape(1), torchs.reshape(1), tolerance=1e-14)


def test_anchors_without_candidates_are_left_out(device: str) -> None:
    z = numbers(0, 5, 3).to(device)
    masks = torch.zeros(2, 5, 5, dtype=torch.bool, device=device)
    masks[0, 0, 1] = masks[0, 1, 0] = True
    mean, total = (SigLIPLoss(reduction=kind)(z, pairs=tuple(masks)) for kind in ("mean", "sum"))
    assert float(mean) == pytest.approx(float(total) / 2, rel=1e-14)
    assert float(SigLIPLoss()(z[:1], torch.zeros(1, dtype=torch.int64, device=device))) == 0


def test_single_precision(device: str) -> None:
    z, labels = numbers(0, 24, 5).to(device).float(), (torch.arange(24) % 6).to(device)
    loss = SigLIPLoss(100.0, -50.0)
    single, double = (loss.output_hessian(x, labels).dense().double() for x in (z, z.double()))
    assert close(single, double, tolerance=1e-5)


@each(
    "options, name",
    [
        ({"scale": 0.0}, "scale"),
        ({"scale": math.nan}, "scale"),
        ({"scale": "10"}, "scale"),
        ({"bias": math.inf}, "bias"),
        ({"bias": True}, "bias"),
        ({"reduction": "none"}, "reduction"),
        ({"directions": "ab"}, "directions"),
    ],
)
def test_options(options: dict[str, Any], name: str, device: str) -> None:
    del device
    with pytest.raises(cc.InputError, match=f"^{name}: "):
        SigLIPLoss(**options)
