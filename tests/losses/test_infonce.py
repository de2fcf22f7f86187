"""InfoNCE against a loop over pairs, autograd, torch's cross entropy and pytorch-metric-learning."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import assume, given
from hypothesis import strategies as st
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
from torch import Tensor
from torch.nn import functional as F

import contrastive_curvature as cc
from contrastive_curvature.losses.infonce import InfoNCELoss

pytestmark = pytest.mark.parametrize("device", DEVICES)

temperatures = st.sampled_from(TEMPERATURES)
reductions = st.sampled_from(("mean", "sum"))


def size(tau: float) -> float:
    """Of the derivatives in the cosines."""
    return 1 / tau + 1 / tau**2


def of_anchor(tau: float) -> Any:
    """By hand: a softmax for every positive."""

    def value(s: list[float], positive: list[float], negative: list[float]) -> tuple[float, float]:
        total = 0.0
        for a, times in zip(s, positive, strict=True):
            if times:
                rest = sum(n * math.exp((b - a) / tau) for b, n in zip(s, negative, strict=True))
                total += times * math.log1p(rest)
        return total, sum(positive)

    return value


@given(case=cases(), tau=temperatures, reduction=reductions)
def test_value_is_a_sum_over_positive_pairs(case: Case, tau: float, reduction: str, device: str) -> None:
    loss, moved = InfoNCELoss(tau, reduction), case.to(device)
    truth = slow_value(case, of_anchor(tau), reduction)
    assert float(loss(moved.z, **moved.given)) == pytest.approx(truth, rel=1e-11, abs=1e-14 / tau)


@given(
    case=cases(), tau=temperatures, reduction=reductions, fix=st.sampled_from(("full", "ggn")), seed=st.integers(0, 99)
)
def test_derivatives_are_those_of_autograd(
    case: Case, tau: float, reduction: str, fix: str, seed: int, device: str
) -> None:
    check_hessian(InfoNCELoss(tau, reduction), case, device, size(tau))
    check_products(InfoNCELoss(tau, pd_fix=fix), case, device, size(tau), seed)
    check_ggn_is_psd(InfoNCELoss(tau), case, device, size(tau))


@given(drawn=towers(), tau=temperatures)
def test_two_towers(drawn: Towers, tau: float, device: str) -> None:
    check_towers(lambda **o: InfoNCELoss(tau, **o), drawn, device, size(tau))


@given(case=cases(), tau=temperatures, share=st.sampled_from((0.01, 0.3, 2.5)))
def test_negatives_that_count_a_fraction(case: Case, tau: float, share: float, device: str) -> None:
    """The same as a shift of their cosines by ``tau log(share)``, so that autograd has an oracle."""
    loss, moved = InfoNCELoss(tau), case.to(device)
    relation = loss.relate(moved.z, moved.labels, moved.pairs)
    s = numbers(3, *[len(case.z)] * 2).clamp(-1, 1).to(device)
    positive, negative = (part.double() for part in relation.rows(0, len(case.z)))
    kept = positive.sum(1) > 0
    # A pair that counts as both has one cosine, of which only a part would be shifted.
    assume(bool(kept.any()) and not bool((positive * negative).any()))
    s, positive, negative = s[kept], positive[kept], negative[kept]
    truth = loss._value(s + (negative > 0).double() * (tau * math.log(share)), positive, negative)
    assert close(loss._value(s, positive, share * negative), truth, 1.0, 1e-12)
    terms = loss._terms(s, positive, share * negative, loss._statistics(s, positive, share * negative))
    assert terms.second is not None
    for i in range(len(s)):
        one = positive[i : i + 1], share * negative[i : i + 1]

        def value(x: Tensor, one: tuple[Tensor, Tensor] = one) -> Tensor:
            return loss._value(x, *one).sum()

        found = torch.diag(terms.second[i])
        for sign, root in zip(loss.root_signs, terms.roots, strict=True):
            found = found + sign * torch.outer(root[i], root[i])
        truth = torch.autograd.functional.hessian(value, s[i : i + 1])[0, :, 0]
        assert close(found, truth, 1e-3 / tau**2)


@pytest.mark.parametrize("tau", [0.05, 0.07, 1.0])
def test_same_as_nt_xent_of_pytorch_metric_learning(tau: float, device: str) -> None:
    """Values and gradients. It adds the smallest normal number inside the logarithm, of no effect here."""
    for seed in range(5):
        z = numbers(seed, 12, 4).to(device).requires_grad_()
        labels = (torch.arange(12) % (2 + seed)).to(device)
        check_same(InfoNCELoss(tau)(z, labels), losses.NTXentLoss(tau)(z, labels), z)


@pytest.mark.parametrize("tau", [0.01, 0.07, 1.0])
def test_two_towers_are_cross_entropies(tau: float, device: str) -> None:
    """One direction is ``MultipleNegativesRankingLoss`` of sentence-transformers: ``cross_entropy(scale * cos(a, b),
    arange)``, which is not installed here. The mean of both is CLIP's loss."""
    a, b = numbers(0, 6, 3).to(device), numbers(1, 6, 3).to(device)
    logits, target = F.normalize(a) @ F.normalize(b).T / tau, torch.arange(6, device=device)
    one, other = F.cross_entropy(logits, target), F.cross_entropy(logits.T, target)
    for directions, truth in (("a", one), ("b", other), ("both", (one + other) / 2)):
        found = InfoNCELoss(scale=1 / tau, directions=directions).between(a, b)
        assert close(found.reshape(1), truth.reshape(1), tolerance=1e-13)


def test_anchors_without_negatives_add_nothing(device: str) -> None:
    """Their terms are zero, their derivatives too, and they count in the mean."""
    z = numbers(0, 5, 3).to(device).requires_grad_()
    alone = InfoNCELoss()(z, torch.zeros(5, dtype=torch.int64, device=device))
    (gradient,) = torch.autograd.grad(alone, z)
    assert float(alone.detach()) == 0
    assert not gradient.any()
    hessian = InfoNCELoss().output_hessian(z.detach(), torch.zeros(5, dtype=torch.int64, device=device))
    assert not hessian.dense().any()
    masks = torch.zeros(2, 5, 5, dtype=torch.bool, device=device)
    masks[0, 0, 1] = masks[0, 1, 0] = masks[0, 2, 3] = masks[0, 3, 2] = masks[1, 0, 4] = masks[1, 4, 0] = True
    mean, total = (InfoNCELoss(reduction=kind)(z, pairs=tuple(masks)) for kind in ("mean", "sum"))
    assert float(mean.detach()) == pytest.approx(float(total.detach()) / 4, rel=1e-14)


@pytest.mark.parametrize("fix", ["ggn", "full"])
@pytest.mark.parametrize("pull", [0.0, 0.3, 1.0])
def test_single_precision_at_a_low_temperature(fix: str, pull: float, device: str) -> None:
    """Also where every positive is told apart surely, and all weights are small."""
    labels = (torch.arange(24) % 6).to(device)
    centres = numbers(1, 6, 5).to(device)
    z = numbers(0, 24, 5).to(device) + pull * centres[labels]
    loss = InfoNCELoss(0.005, pd_fix=fix)
    # The same points for both: those that single precision can hold.
    z = z.float()
    single, double = (loss.output_hessian(x, labels).dense().double() for x in (z, z.double()))
    assert bool(single.isfinite().all())
    # A logit is 200 cosines, each wrong by some 1e-7.
    assert close(single, double, tolerance=5e-4)


def test_separated_positives_lose_no_digits(device: str) -> None:
    """All weights are of the size of 1e-6 where every positive is surely told apart; roots must not be larger."""
    z = torch.tensor([[1.0, 0, 0], [1, 0.1, 0], [0, 0, 1.0], [0, 0.1, 1]], device=device)
    labels = torch.tensor([0, 0, 1, 1], device=device)
    loss = InfoNCELoss(0.07, pd_fix="full")
    single, double = (loss.output_hessian(x, labels).dense().double() for x in (z, z.double()))
    assert float(double.abs().max()) < 1e-3
    assert close(single, double, tolerance=1e-4)


@each(
    "options, name",
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "0.1"}, "temperature"),
        ({"scale": 0.0}, "scale"),
        ({"scale": 1e-320}, "temperature"),
        ({"scale": 20.0, "temperature": 0.05}, "temperature, scale"),
        ({"reduction": "none"}, "reduction"),
        ({"directions": "ab"}, "directions"),
        ({"pd_fix": "none"}, "pd_fix"),
    ],
)
def test_options(options: dict[str, Any], name: str, device: str) -> None:
    del device
    with pytest.raises(cc.InputError, match=name):
        InfoNCELoss(**options)


def test_options_are_shown(device: str) -> None:
    """Saved posteriors contain this text."""
    del device
    assert "temperature=0.05" in repr(InfoNCELoss(scale=20.0))
    assert InfoNCELoss().temperature == 0.1
