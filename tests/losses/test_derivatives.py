"""Pair weights against a list of pairs walked one by one, however they are given and summed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Case, cases, close, relate_by_remainder
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses import contrastive
from contrastive_curvature.losses.class_table import ClassTable
from contrastive_curvature.losses.over_dataset import dataset_hessian
from contrastive_curvature.losses.pair_derivatives import PairDerivatives
from contrastive_curvature.pairs import make_relation, relation
from contrastive_curvature.pairs.rows import Rows
from contrastive_curvature.testing import list_pairs, pair_weights


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


@settings(max_examples=80)
@given(case=cases(), elements=st.sampled_from((2**25, 1, 5, 11)))
def test_weights_and_all_their_sums(case: Case, elements: int, device: str) -> None:
    """In blocks of any size."""
    truth = true_weights(case)
    size = float(truth.abs().max())
    u = normalize(case.z)[0]
    with pytest.MonkeyPatch.context() as patch:
        if elements < 2**25:
            patch.setattr(relation, "BLOCK_ELEMENTS", elements)
            patch.setattr(contrastive, "_TILE_ROWS", 2)
            patch.setattr(contrastive, "_TILE_COLUMNS", 3)
        made = make_weights(case, device)
        sums = made.node_sums()
        assert close(made.dense()[0].cpu(), truth, size, 1e-14)
        assert close(made.matmul(case.z[:, :, None].to(device)).cpu()[:, :, 0], -truth @ case.z, 10 * size, 1e-13)
        assert close(sums.degree.cpu(), truth.sum(1), size, 1e-13)
        assert close(sums.neighbors.cpu(), truth @ u, size, 1e-13)
        assert close(made.rows(0, 1)[0].cpu(), truth[:1], size, 1e-14)


@given(case=cases(), seed=st.integers(0, 99))
def test_points_that_come_again_in_any_order(case: Case, seed: int, device: str) -> None:
    """What the second pass over a loader asks for: sums over neighbours, and weights between batches."""
    if isinstance(case.pairs, tuple):
        case.pairs, case.labels = relate_by_remainder, torch.arange(len(case.z))
    moved, truth = case.to(device), true_weights(case)
    size, n = float(truth.abs().max()), len(case.z)
    targets = torch.arange(n, device=device) if moved.labels is None else moved.labels
    rows = Rows(None, 3 * torch.arange(n) + 5, {"outputs": moved.z, "targets": targets})
    table = ClassTable.of(moved.z, targets) if case.pairs is None else None
    loss = cc.ContrastiveLoss(**case.options)
    hessian = dataset_hessian(loss, table, moved.pairs, rows, None, moved.z.dtype)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    part = hessian.place(moved.z[order], targets[order], rows.numbers[order])
    sums = hessian.sums_for(part)
    u = normalize(case.z)[0]
    assert close(sums.degree.cpu(), truth.sum(1)[order], size, 1e-13)
    assert close(sums.neighbors.cpu(), (truth @ u)[order], size, 1e-13)
    every = hessian.place(moved.z, targets, rows.numbers)
    assert close(hessian.cross(part, every).y.cpu(), truth[order], size, 1e-13)


# torch's own vmap of logsigmoid.
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("loss", [cc.ContrastiveLoss(1.2), cc.InfoNCELoss(), cc.LogisticLoss(), cc.TripletLoss()])
def test_hessians_of_an_ensemble_by_vmap(loss: cc.losses.CosineLoss) -> None:
    labels = torch.arange(8) % 3
    members = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = torch.func.vmap(torch.func.hessian(lambda z: loss(z, labels)))(members)
    for z, hessian in zip(members, found, strict=True):
        wanted = loss.output_hessian(z, labels, distance="arccos", pd_fix="full").dense()
        assert close(hessian.reshape_as(wanted), wanted)
    members[1, 5] = 0
    with pytest.raises(cc.InputError, match=r"non-zero norm, got zero norm in rows \[5\]"):
        torch.func.vmap(lambda z: loss(z, labels))(members)
