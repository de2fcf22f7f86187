"""Pair weights against a list of pairs walked one by one, however they are given and summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.utils.loss_and_miner_utils import get_all_pairs_indices
from strategies import NORMALIZATIONS, Case, cases, close, relate_by_remainder
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses import contrastive_classes
from contrastive_curvature.losses.pair_derivatives import PairDerivatives
from contrastive_curvature.pairs import edges, make_relation, relation
from contrastive_curvature.testing import list_pairs, pair_loss, pair_weights

pytestmark = pytest.mark.parametrize("device", DEVICES)


def make_weights(case: Case, device: str) -> PairDerivatives:
    moved = case.to(device)
    made = make_relation(len(case.z), torch.device(device), moved.labels, moved.pairs)
    return cc.ContrastiveLoss(**case.options).derivatives(made, normalize(moved.z)[0])


def true_weights(case: Case) -> Tensor:
    n, options = len(case.z), case.options
    listed = pair_weights(list_pairs(n, case.labels, case.pairs), options["negative_weight"], options["normalization"])
    y = torch.zeros(n, n, dtype=torch.float64)
    u = case.z / case.z.norm(dim=1, keepdim=True)
    for (i, j, sign), weight in listed.items():
        # At a margin of 2, the largest distance there is, no rounding decides.
        unmasked = options["margin"] in (None, 2)
        inside = unmasked or float((u[i] - u[j]).square().sum()) < options["margin"] ** 2
        if sign > 0 or (inside and options["pd_fix"] != "positive"):
            y[i, j] += weight
            y[j, i] += weight
    return y


@given(case=cases())
def test_weights_and_all_their_sums(case: Case, device: str) -> None:
    made, truth = make_weights(case, device), true_weights(case)
    size = float(truth.abs().max())
    u = normalize(case.z)[0]
    assert close(made.dense()[0].cpu(), truth, size, 1e-14)
    assert close(made.matmul(case.z.to(device)).cpu(), truth @ case.z, 10 * size, 1e-13)
    sums = made.node_sums()
    assert close(sums.degree.cpu(), truth.sum(1), size, 1e-13)
    assert close(sums.neighbors.cpu(), truth @ u, size, 1e-13)
    assert close(made.rows(0, 1)[0].cpu(), truth[:1], size, 1e-14)


@given(case=cases(), elements=st.sampled_from((1, 5, 11)))
def test_bounded_blocks_change_nothing(case: Case, elements: int, device: str) -> None:
    truth = true_weights(case)
    u = normalize(case.z)[0]
    with pytest.MonkeyPatch.context() as patch:
        for module in (edges, relation):
            patch.setattr(module, "BLOCK_ELEMENTS", elements)
        patch.setattr(contrastive_classes, "_TILE_ROWS", 2)
        patch.setattr(contrastive_classes, "_TILE_COLUMNS", 3)
        made = make_weights(case, device)
        sums = made.node_sums()
        assert close(made.dense()[0].cpu(), truth, float(truth.abs().max()), 1e-14)
        assert close(sums.degree.cpu(), truth.sum(1), float(truth.abs().max()), 1e-13)
        assert close(sums.neighbors.cpu(), truth @ u, float(truth.abs().max()), 1e-13)


@given(case=cases(), seed=st.integers(0, 99))
def test_points_that_come_again_in_any_order(case: Case, seed: int, device: str) -> None:
    """What the second pass over a loader asks for: places, sums over neighbours, and weights between batches."""
    if isinstance(case.pairs, tuple):
        case.pairs, case.labels = relate_by_remainder, torch.arange(len(case.z))
    made, truth = make_weights(case, device), true_weights(case)
    size = float(truth.abs().max())
    order = torch.randperm(len(case.z), generator=torch.Generator().manual_seed(seed))
    u, targets = made.u[order], made.relation.targets[order]
    sums = made.sums_for(u, targets)
    assert close(sums.degree.cpu(), truth.sum(1)[order], size, 1e-13)
    assert close(sums.neighbors.cpu(), (truth @ made.u.cpu())[order], size, 1e-13)
    places = made.places(u, targets)
    assert torch.equal(made.u[places], u)
    assert torch.equal(made.relation.targets[places], targets)
    itself = order.to(device).unsqueeze(1) == torch.arange(len(order), device=device)
    between = made.between(u, targets, made.u, made.relation.targets, itself)[0].cpu()
    assert close(between, truth[order], size, 1e-13)


@given(case=cases())
def test_loss_equals_a_sum_over_pairs(case: Case, device: str) -> None:
    options, moved = case.options, case.to(device)
    loss = cc.ContrastiveLoss(options["margin"], options["negative_weight"], options["normalization"])
    listed = pair_weights(list_pairs(len(case.z), case.labels, case.pairs), loss.negative_weight, loss.normalization)
    u = case.z / case.z.norm(dim=1, keepdim=True)
    truth = pair_loss(u, u, listed, loss.margin)
    size = 4 * sum(abs(w) for w in listed.values())
    assert close(loss(moved.z, **moved.given).cpu().reshape(1), truth.reshape(1), size, 1e-13)
    assert close(loss(normalize(moved.z)[0], **moved.given).cpu().reshape(1), truth.reshape(1), size, 1e-13)
    found, cost = make_weights(
        Case(case.z, case.labels, case.pairs, {**options, "pd_fix": "full"}), device
    ).loss_and_cost()
    assert close(found.cpu().reshape(1), truth.reshape(1), size, 1e-13)
    assert float(cost) >= -1e-13 * size
    assert loss.margin is None or float(cost) == float(found)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_what_the_normalisations_promise(normalization: str, device: str) -> None:
    """Eq. 23: each type sums to one over unordered pairs. Eq. 119: at each point of balanced classes."""
    torch.manual_seed(0)
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2], device=device)
    z = torch.randn(9, 3, dtype=torch.float64, device=device)
    positives = cc.output_hessian(z, labels, margin=None, negative_weight=0.0, normalization=normalization)
    negatives = cc.output_hessian(z, labels, margin=None, negative_weight=1.0, normalization=normalization)
    for made, sign, count in ((positives, 1, 9), (negatives, -1, 27)):
        y = sign * made.derivatives.dense()[0]
        each = {"sum": count, "type": 1.0, "anchor": 4.5}[normalization]
        assert float(y.sum() / 2) == pytest.approx(each, rel=1e-14)
        if normalization == "anchor":
            assert torch.allclose(y.sum(1), torch.ones(9, dtype=torch.float64, device=device), rtol=1e-14)


def test_tuples_of_a_miner(device: str) -> None:
    """As pytorch-metric-learning returns them: ordered, so every unordered pair is listed twice."""
    torch.manual_seed(0)
    z = torch.randn(12, 4, dtype=torch.float64, device=device)
    labels = torch.arange(12, device=device) % 3
    everything = get_all_pairs_indices(labels)
    twice = cc.output_hessian(z, pairs=everything, normalization="sum").dense()
    assert close(twice, 2 * cc.output_hessian(z, labels, normalization="sum").dense(), tolerance=1e-13)
    assert close(
        cc.output_hessian(z, pairs=everything, normalization="type").dense(),
        cc.output_hessian(z, labels, normalization="type").dense(),
        tolerance=1e-13,
    )
    mined: Any = miners.TripletMarginMiner(margin=0.2)(z, labels)
    assert len(mined) == 3
    assert torch.isfinite(cc.ContrastiveLoss(normalization="sum")(z, pairs=mined))


def test_margin_is_that_of_pytorch_metric_learning(device: str) -> None:
    """The same pairs are inside; the cost inside is squared here and linear there."""
    torch.manual_seed(0)
    z = torch.randn(16, 3, dtype=torch.float64, device=device, requires_grad=True)
    labels = torch.arange(16, device=device)
    margin = 0.7
    linear = losses.ContrastiveLoss(pos_margin=0, neg_margin=margin)
    (theirs,) = torch.autograd.grad(linear(z, labels), z)
    (ours,) = torch.autograd.grad(cc.ContrastiveLoss(margin)(z, labels), z)
    assert torch.equal(theirs.abs().sum(1) > 1e-12, ours.abs().sum(1) > 1e-12)
    assert 0 < int((ours.abs().sum(1) > 1e-12).sum()) < 16


@given(case=cases())
def test_gradient_vanishes_without_pairs_and_exists_with_them(case: Case, device: str) -> None:
    moved = case.to(device)
    z = moved.z.clone().requires_grad_()
    options = case.options
    loss = cc.ContrastiveLoss(options["margin"], options["negative_weight"], options["normalization"])
    value = loss(z, **moved.given)
    (gradient,) = torch.autograd.grad(value, z)
    assert bool(gradient.isfinite().all())
    if not list_pairs(len(z), case.labels, case.pairs):
        assert float(value.detach()) == 0
        assert not gradient.any()
