"""Losses of anchors whose negatives come from a bank: exact with all points in it, and in the mean over banks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import numbers
from strategies import DISTANCES, close
from tables import covering, each
from torch import Tensor

from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.hessian.dataset import DatasetHessian
from contrastive_curvature.hessian.derivatives import NodeSums
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses import sampled as sampled_points
from contrastive_curvature.losses import sampled_rows
from contrastive_curvature.losses.infonce import InfoNCELoss
from contrastive_curvature.losses.multisimilarity import MultiSimilarityLoss
from contrastive_curvature.losses.rows import RowLoss
from contrastive_curvature.losses.sampled_rows import SampledRowDerivatives
from contrastive_curvature.losses.siglip import SigLIPLoss
from contrastive_curvature.losses.supcon import SupConLoss
from contrastive_curvature.losses.triplet_hinge import TripletLoss
from contrastive_curvature.pairs.relation import LabelRelation

pytestmark = pytest.mark.parametrize("device", DEVICES)

LOSSES: dict[str, Callable[..., RowLoss]] = {
    "infonce": lambda tau, **o: InfoNCELoss(tau, **o),
    "supcon": lambda tau, **o: SupConLoss(tau, **o),
    "siglip": lambda tau, **o: SigLIPLoss(1 / tau, -1.0, **o),
    "multi-similarity": lambda tau, **o: MultiSimilarityLoss(0.5 / tau, 1 / tau, 0.3, **o),
    "triplet": lambda _, **o: TripletLoss(0.5, **o),
}
CURVED = tuple(name for name in LOSSES if name != "triplet")
FIXES = ("fixed", "psd", "psd_parts", "ggn_fixed")
TEMPERATURES = (0.01, 0.1, 1.0)


def make(name: str, tau: float = 0.1, **options: Any) -> RowLoss:
    """A loss; the triplet loss has no ``ggn_fixed``."""
    if name == "triplet" and options.get("pd_fix") == "ggn_fixed":
        options["pd_fix"] = "fixed"
    return LOSSES[name](tau, **options)


def sampled(
    loss: RowLoss, z: Tensor, labels: Tensor, bank: Tensor, negatives_per_anchor: int | None = None
) -> DatasetHessian:
    """The Hessian of a data set with a bank."""
    made = SampledRowDerivatives(loss, normalize(z)[0], labels, bank, negatives_per_anchor)
    return DatasetHessian(z, made, loss.distance, loss.pd_fix)


def sums_of(sums: NodeSums) -> Tensor:
    """Degrees, sums of neighbours and moments of every point, one row each."""
    parts = [sums.degree.unsqueeze(1), sums.neighbors]
    return torch.cat(parts if sums.moments is None else [*parts, sums.moments.dense().flatten(1)], dim=1)


@st.composite
def sets(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Points, labels with any class sizes, and a seed."""
    seed, sizes = draw(st.integers(0, 2**16)), draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    labels = torch.tensor([3 * k - 4 for k, size in enumerate(sizes) for _ in range(size)])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return numbers(seed, len(labels), draw(st.integers(2, 4))), labels[order], seed


@given(
    sets(),
    st.sampled_from(TEMPERATURES),
    st.sampled_from(FIXES),
    st.sampled_from(DISTANCES),
    st.sampled_from(("mean", "sum")),
)
@pytest.mark.parametrize("name", LOSSES)
def test_a_bank_of_all_points_is_exact(
    name: str, device: str, case: tuple[Tensor, Tensor, int], tau: float, fix: str, distance: str, reduction: str
) -> None:
    """In any order and in batches, and points keep their blocks when they arrive in another order."""
    (z, labels), seed = (part.to(device) for part in case[:2]), case[2]
    loss = make(name, tau, pd_fix=fix, distance=distance, reduction=reduction)
    whole = loss.data_hessian(z, LabelRelation(labels))
    # Rounding of second derivatives before they cancel.
    floor = 1e-3 * len(z) * max(1, (1 / tau) ** 2) / float(z.norm(dim=1).min()) ** 2
    order, bank = (torch.randperm(len(z), generator=torch.Generator().manual_seed(seed + k)) for k in range(2))
    order = order.to(device)
    found = sampled(loss, z, labels, bank.to(device))
    assert found.derivatives.anchors == whole.derivatives.anchors
    assert found.derivatives.skipped == whole.derivatives.skipped
    for ours, theirs in zip(found.loss_and_cost(), whole.loss_and_cost(), strict=True):
        assert close(ours.reshape(1), theirs.reshape(1), scale=1e-3 * len(z) / tau)
    total = torch.zeros_like(whole.blocks.total())
    for rows in order.split(max(1, len(z) // 2)):
        blocks = found.at(z[rows], labels[rows]).blocks
        assert close(blocks.dense(), whole.blocks.dense()[rows], floor)
        assert close(blocks.diagonal(), whole.blocks.diagonal()[rows], floor)
        some = slice(len(rows) // 2, len(rows))
        assert close(blocks[some].dense(), whole.blocks.dense()[rows][some], floor)
        v = numbers(seed, *z[rows].shape, 2).to(device)
        assert close(blocks.matmul(v), whole.blocks.dense()[rows] @ v, floor)
        total += blocks.total()
    assert close(total, whole.blocks.total(), floor)
    assert close(found.whole().point_blocks(), whole.point_blocks(), floor)


@pytest.mark.parametrize("name", LOSSES)
def test_blocks_of_any_size_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """One pair at a time, nothing kept, one class at a time; batches and order of the points are of no effect."""
    z, labels = numbers(0, 23, 3).to(device), (torch.arange(23, device=device) ** 2) % 7
    bank = torch.randperm(23, generator=torch.Generator().manual_seed(1))[:9].to(device)
    loss = make(name, pd_fix="fixed")
    found = sampled(loss, z, labels, bank)
    dense, diagonal = (getattr(found.at(z, labels).blocks, what)() for what in ("dense", "diagonal"))
    monkeypatch.setattr(sampled_points, "_HELD", 0)
    monkeypatch.setattr(sampled_rows, "_COSINES", 64)
    for module in (sampled_points, sampled_rows):
        monkeypatch.setattr(module, "_PAIRS", 64)
    monkeypatch.setattr(sampled_points, "_TOGETHER", 4)
    again = sampled(loss, z, labels, bank)
    for rows in torch.randperm(23, generator=torch.Generator().manual_seed(2)).to(device).split(8):
        blocks = again.at(z[rows], labels[rows]).blocks
        assert close(blocks.dense(), dense[rows], tolerance=1e-13)
        assert close(blocks.diagonal(), diagonal[rows], tolerance=1e-12)
        assert close(blocks[2:5].diagonal(), diagonal[rows][2:5], tolerance=1e-12)


@each("name", LOSSES)
def test_equal_points_are_told_apart_from_themselves(name: str, device: str) -> None:
    """Each is left out once, whichever of the two it is taken for."""
    z, labels = numbers(0, 8, 3).to(device), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2], device=device)
    z[1], z[4], z[5] = z[0], z[3], z[2]
    loss = make(name, pd_fix="fixed")
    found = sampled(loss, z, labels, torch.arange(8, device=device)).at(z, labels)
    assert close(found.blocks.dense(), loss.data_hessian(z, LabelRelation(labels)).blocks.dense())


@each("name", LOSSES)
def test_points_that_arrive_rounded_in_another_way_are_recognised(name: str, device: str) -> None:
    """Their blocks move as little as they do."""
    z, labels = numbers(0, 14, 3).to(device), torch.arange(14, device=device) % 3
    found = sampled(make(name, 0.5, pd_fix="fixed"), z, labels, torch.arange(0, 14, 2, device=device))
    moved = z * (1 + 1e-9 * numbers(1, 14, 3).to(device))
    rows = torch.arange(13, -1, -1, device=device)
    blocks = found.at(moved[rows], labels[rows]).blocks
    assert close(blocks.dense(), found.at(z, labels).blocks.dense()[rows], tolerance=1e-7)


@pytest.mark.parametrize("many", [1, 3, 100])
def test_negatives_count_less_where_an_anchor_had_fewer(many: int, device: str) -> None:
    z, labels = numbers(0, 9, 3).to(device), torch.arange(9, device=device) % 3
    loss = InfoNCELoss(0.2, pd_fix="fixed")
    whole = loss.data_hessian(z, LabelRelation(labels), min(1.0, many / 8))
    found = sampled(loss, z, labels, torch.arange(9, device=device), many)
    assert close(found.at(z, labels).blocks.dense(), whole.blocks.dense())
    assert close(found.loss_and_cost()[0].reshape(1), whole.loss_and_cost()[0].reshape(1))


def mean_of_all_banks(loss: RowLoss, z: Tensor, labels: Tensor, many: int) -> Tensor:
    """Mean of the sums of all points over all banks of a size that have points of two classes."""
    total, count = torch.zeros((), dtype=z.dtype, device=z.device), 0
    for bank in itertools.combinations(range(len(z)), many):
        chosen = torch.tensor(bank, device=z.device)
        if len(labels[chosen].unique()) < 2:
            continue
        made = SampledRowDerivatives(loss, normalize(z)[0], labels, chosen)
        total, count = total + sums_of(made.node_sums()), count + 1
    return total / count


@each("labels, many", [([0, 0, 1, 1, 2, 3], 3), ([0, 0, 1, 1, 1, 1], 2), ([0, 1, 1, 1, 0, 1], 5)])
def test_sums_that_are_linear_in_the_pairs_have_no_bias(labels: list[int], many: int, device: str) -> None:
    z, given_labels = numbers(3, len(labels), 3).to(device), torch.tensor(labels, device=device)
    for name in ("siglip", "triplet"):
        loss = make(name, 0.3, reduction="sum", pd_fix="fixed")
        exact = sums_of(loss.data_hessian(z, LabelRelation(given_labels)).derivatives.node_sums())
        assert close(mean_of_all_banks(loss, z, given_labels, many), exact, tolerance=1e-12)


@each("name", ["infonce", "supcon"])
def test_what_a_point_gets_as_a_candidate_has_no_bias(name: str, device: str) -> None:
    """Points without a positive are no anchors: all that they have, they have as candidates."""
    labels = torch.tensor([0, 0, 1, 1, 2, 3], device=device)
    z, loss = numbers(4, 6, 3).to(device), make(name, 0.1, pd_fix="fixed")
    exact = sums_of(loss.data_hessian(z, LabelRelation(labels)).derivatives.node_sums())
    mean = mean_of_all_banks(loss, z, labels, 3)
    assert close(mean[4:], exact[4:], tolerance=1e-12)
    assert not close(mean[:4], exact[:4], tolerance=1e-3)


@each("name", ["infonce", "supcon", "multi-similarity"])
def test_the_bias_falls_like_one_over_the_bank(name: str, device: str) -> None:
    """Over all banks of 4, 6 and 7 of 8 points: at least as fast, down to zero for all 8."""
    z, labels = numbers(5, 8, 3).to(device), torch.arange(8, device=device) % 3
    loss = make(name, 0.5, pd_fix="fixed")
    exact = sums_of(loss.data_hessian(z, LabelRelation(labels)).derivatives.node_sums())
    bias = {many: float((mean_of_all_banks(loss, z, labels, many) - exact).norm()) for many in (4, 6, 7)}
    for many in (6, 7):
        assert 1e-6 * float(exact.norm()) < bias[many] <= bias[4] * 4 / many


@covering(1, name=CURVED, fix=["psd_parts", "ggn_fixed"])
def test_curvature_of_any_bank_is_positive_semidefinite(name: str, fix: str, device: str) -> None:
    """Also of points outside the bank that are close to its anchors, where a share of a sampled softmax exceeds one."""
    z, labels = numbers(6, 30, 3).to(device), torch.arange(30, device=device) % 6
    z[6:12] = z[torch.arange(1, 7, device=device)] + 0.01 * z[6:12]
    loss = make(name, 0.02, pd_fix=fix)
    for seed in range(5):
        bank = torch.randperm(30, generator=torch.Generator().manual_seed(seed))[:6].to(device)
        dense = sampled(loss, z, labels, bank).at(z, labels).blocks.dense()
        values = torch.linalg.eigvalsh(dense)
        assert float(values.min()) >= -1e-12 * 2500 / float(z.norm(dim=1).min()) ** 2


@covering(1, name=LOSSES, fix=FIXES)
def test_single_precision(name: str, fix: str, device: str) -> None:
    """At a temperature of 0.05, in the dtype of the outputs, within 1e-3 of double precision."""
    z, labels = numbers(7, 60, 8).to(device), torch.arange(60, device=device) % 7
    z += 3 * numbers(8, 7, 8).to(device)[labels]
    bank, loss = torch.arange(0, 60, 2, device=device), make(name, 0.05, pd_fix=fix)
    # Outputs of the same value in both.
    z = z.float().double()
    wide, narrow = (sampled(loss, part, labels, bank).at(part, labels).blocks for part in (z, z.float()))
    for what in ("dense", "diagonal", "total"):
        theirs, ours = getattr(wide, what)(), getattr(narrow, what)()
        assert ours.dtype == torch.float32
        assert close(ours.double(), theirs, tolerance=1e-3)


def test_points_without_any_term(device: str) -> None:
    """One point, and one class: no negatives, so that no bank is needed."""
    for name in LOSSES:
        for n in (1, 3):
            z, labels = numbers(9, n, 3).to(device), torch.zeros(n, dtype=torch.int64, device=device)
            loss = make(name, pd_fix="fixed")
            for bank in (torch.arange(n, device=device), torch.arange(0, device=device)):
                found = sampled(loss, z, labels, bank)
                whole = loss.data_hessian(z, LabelRelation(labels))
                assert close(found.at(z, labels).blocks.dense(), whole.blocks.dense(), 1.0)
                assert found.at(z[:0], labels[:0]).blocks.dense().shape == (0, 3, 3)
                assert bool(found.loss_and_cost()[0].isfinite())
            nothing = sampled(loss, z[:0], labels[:0], torch.arange(0, device=device))
            assert nothing.at(z[:0], labels[:0]).blocks.total().shape == (3, 3)
            assert nothing.loss_and_cost()[0] == 0


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    z, labels = numbers(0, 6, 3).to(device), torch.arange(6, device=device) % 3
    everything = torch.arange(6, device=device)
    for fix in ("full", "positive", "ggn"):
        with pytest.raises(UnsupportedError, match=f"negative_samples.*{fix}.*Use pd_fix"):
            sampled(InfoNCELoss(pd_fix=fix), z, labels, everything)
    with pytest.raises(UnsupportedError, match="negatives_per_anchor"):
        sampled(SupConLoss(), z, labels, everything, 3)
    with pytest.raises(InputError, match="the same data in every pass"):
        sampled(SupConLoss(), z, labels, everything).at(z, labels + 1)
    monkeypatch.setattr(sampled_rows, "_STATISTICS", 2000)
    with pytest.raises(UnsupportedError, match=r"negative_samples: TripletLoss keeps .* of each of the 6 anchors"):
        sampled(TripletLoss(), z, labels, everything)
