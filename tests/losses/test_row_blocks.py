"""Losses of anchors in blocks of rows, kept or computed again: always the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from devices import DEVICES
from row_cases import numbers
from strategies import close
from tables import covering

from contrastive_curvature.losses import row_derivatives
from contrastive_curvature.losses.infonce import InfoNCELoss
from contrastive_curvature.losses.multisimilarity import MultiSimilarityLoss
from contrastive_curvature.losses.rows import RowLoss
from contrastive_curvature.losses.sides import joined_towers
from contrastive_curvature.losses.siglip import SigLIPLoss
from contrastive_curvature.losses.supcon import SupConLoss
from contrastive_curvature.losses.triplet_hinge import TripletLoss
from contrastive_curvature.pairs.relation import MaskRelation, Relation

pytestmark = pytest.mark.parametrize("device", DEVICES)

LOSSES: dict[str, Callable[..., RowLoss]] = {
    "infonce": InfoNCELoss,
    "supcon": SupConLoss,
    "siglip": SigLIPLoss,
    "multi-similarity": MultiSimilarityLoss,
    "triplet": lambda **o: TripletLoss(0.5, **o),
}
FIXES = ("full", "positive", "psd")


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows one or two at a time, and none of them kept."""
    monkeypatch.setattr(row_derivatives, "_HELD_ELEMENTS", 0)
    monkeypatch.setattr("contrastive_curvature.pairs.relation.BLOCK_ELEMENTS", 40)


@covering(2, name=LOSSES, fix=FIXES, reduction=["mean", "sum"])
def test_one_tower(name: str, fix: str, reduction: str, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Also with anchors that have no term, and pairs that are neither."""
    z = numbers(0, 13, 3).to(device)
    labels = (torch.arange(13) % 4).to(device)
    same, neither = labels[:, None] == labels, torch.zeros(13, 13, dtype=torch.bool, device=device)
    neither[5] = neither[:, 5] = True
    neither[7, 8] = neither[8, 7] = True
    pairs = same & ~neither, ~same & ~neither
    loss = LOSSES[name](reduction=reduction, pd_fix=fix)
    value, whole = loss(z, pairs=pairs), loss.output_hessian(z, pairs=pairs)
    dense, product = whole.dense(), whole.matvec(z)
    shrink(monkeypatch)
    blocked = loss.output_hessian(z, pairs=pairs)
    assert close(loss(z, pairs=pairs).reshape(1), value.reshape(1), tolerance=1e-13)
    assert close(blocked.loss_and_cost()[0].reshape(1), value.reshape(1), tolerance=1e-13)
    assert close(blocked.dense(), dense, tolerance=1e-12)
    assert close(blocked.matvec(z), product, tolerance=1e-12)
    assert blocked.derivatives.anchors == whole.derivatives.anchors == 12
    if whole.coupled:
        for rows, columns in ((slice(2, 9), slice(0, 13)), (slice(4, 6), slice(6, 11))):
            left, right = (made.cross(rows, columns).axis(1) for made in (blocked, whole))
            assert close(left, right, tolerance=1e-12)


@covering(2, name=LOSSES, fix=FIXES, directions=["both", "a", "b"])
def test_two_towers(name: str, fix: str, directions: str, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    a, b = numbers(0, 9, 3).to(device), numbers(1, 6, 3).to(device)
    labels = (torch.arange(9) % 3).to(device), (torch.arange(6) % 3).to(device)
    loss = LOSSES[name](directions=directions, pd_fix=fix)
    z, relation, first = joined_towers(a, b, labels)
    u = z / z.norm(dim=1, keepdim=True)
    value, whole = loss.between(a, b, labels), loss.hessian_of(z, loss.between_towers(relation, u, first))
    dense = whole.dense()
    shrink(monkeypatch)
    blocked = loss.hessian_of(z, loss.between_towers(relation, u, first))
    assert close(loss.between(a, b, labels).reshape(1), value.reshape(1), tolerance=1e-13)
    assert close(blocked.dense(), dense, tolerance=1e-12)
    assert close(whole.loss_and_cost()[0].reshape(1), value.reshape(1), tolerance=1e-13)


@pytest.mark.parametrize("name", ["infonce", "siglip", "multi-similarity", "triplet"])
def test_negatives_that_count_a_fraction(name: str, device: str) -> None:
    """A share of 3 is every negative three times: as a relation that lists it so."""

    class Thrice(Relation):
        def __init__(self, relation: Relation) -> None:
            self.one, self.n, self.device = relation, relation.n, relation.device

        def rows(self, start: int, stop: int, columns: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
            positive, negative = self.one.rows(start, stop, columns)
            return positive, 3 * negative

    z = numbers(0, 9, 3).to(device)
    labels = (torch.arange(9) % 3).to(device)
    same = labels[:, None] == labels
    relation = MaskRelation(same, ~same, 9)
    loss, u = LOSSES[name](reduction="sum", pd_fix="full"), z / z.norm(dim=1, keepdim=True)
    weighted = loss.hessian_of(z, loss.derivatives(relation, u, negative_share=3.0))
    listed = loss.hessian_of(z, loss.derivatives(Thrice(relation), u))
    assert close(weighted.dense(), listed.dense(), tolerance=1e-13)
    assert not close(weighted.dense(), loss.hessian_of(z, loss.derivatives(relation, u)).dense(), tolerance=1e-6)


@covering(1, name=LOSSES, reduction=["mean", "sum"])
def test_a_fit_has_a_mean_over_its_anchors_once_for_each(name: str, reduction: str, device: str) -> None:
    z, labels = numbers(0, 9, 3).to(device), (torch.arange(9) % 3).to(device)
    loss = LOSSES[name](reduction=reduction, pd_fix="full")
    relation = loss.relate(z, labels, None)
    times = 9 if reduction == "mean" else 1
    assert close(
        loss.data_hessian(z, relation).dense(), times * loss.output_hessian(z, labels).dense(), tolerance=1e-13
    )
