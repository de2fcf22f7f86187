"""Losses of pairs whose negatives come from a bank: in blocks of any size, and however its points arrive again."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES
from loss_cases import numbers
from strategies import close
from tables import covering
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.hessian.dataset import DatasetHessian
from contrastive_curvature.hessian.sphere import normalize
from contrastive_curvature.losses import sampled as module
from contrastive_curvature.losses.sampled import SampledPairDerivatives

pytestmark = pytest.mark.parametrize("device", DEVICES)


def make(fix: str = "fixed") -> cc.LogisticLoss:
    return cc.LogisticLoss(4.0, -1.0, 0.3, "type", pd_fix=fix)


def sampled(loss: cc.LogisticLoss, z: Tensor, labels: Tensor, bank: Tensor) -> DatasetHessian:
    """The Hessian of a data set with a bank."""
    made = SampledPairDerivatives(loss, normalize(z)[0], labels, bank)
    return DatasetHessian(z, made, loss.distance, loss.pd_fix)


def test_blocks_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """One pair at a time, nothing kept, one class at a time; batches and order of the points are of no effect."""
    z, labels = numbers(0, 23, 3).to(device), (torch.arange(23, device=device) ** 2) % 7
    bank = torch.randperm(23, generator=torch.Generator().manual_seed(1))[:9].to(device)
    found = sampled(make(), z, labels, bank)
    dense, diagonal = (getattr(found.at(z, labels).blocks, what)() for what in ("dense", "diagonal"))
    for name, size in (("_HELD", 0), ("_PAIRS", 64), ("_TOGETHER", 4)):
        monkeypatch.setattr(module, name, size)
    again = sampled(make(), z, labels, bank)
    for rows in torch.randperm(23, generator=torch.Generator().manual_seed(2)).to(device).split(8):
        blocks = again.at(z[rows], labels[rows]).blocks
        assert close(blocks.dense(), dense[rows], tolerance=1e-13)
        assert close(blocks.diagonal(), diagonal[rows], tolerance=1e-12)
        assert close(blocks[2:5].diagonal(), diagonal[rows][2:5], tolerance=1e-12)


def test_equal_points_are_told_apart_from_themselves(device: str) -> None:
    """Each is left out once, whichever of the two it is taken for."""
    z, labels = numbers(0, 8, 3).to(device), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2], device=device)
    z[1], z[4], z[5] = z[0], z[3], z[2]
    found = sampled(make(), z, labels, torch.arange(8, device=device)).at(z, labels)
    assert close(found.blocks.dense(), make().output_hessian(z, labels).blocks.dense())


def test_points_that_arrive_rounded_in_another_way_are_recognised(device: str) -> None:
    """Their blocks move as little as they do."""
    z, labels = numbers(0, 14, 3).to(device), torch.arange(14, device=device) % 3
    found = sampled(make(), z, labels, torch.arange(0, 14, 2, device=device))
    moved = z * (1 + 1e-9 * numbers(1, 14, 3).to(device))
    rows = torch.arange(13, -1, -1, device=device)
    blocks = found.at(moved[rows], labels[rows]).blocks
    assert close(blocks.dense(), found.at(z, labels).blocks.dense()[rows], tolerance=1e-7)


@covering(1, fix=["fixed", "psd", "psd_parts", "ggn_fixed"])
def test_single_precision(fix: str, device: str) -> None:
    """In the dtype of the outputs, within 1e-3 of double precision."""
    z, labels = numbers(7, 60, 8).to(device), torch.arange(60, device=device) % 7
    z += 3 * numbers(8, 7, 8).to(device)[labels]
    # Outputs of the same value in both.
    z, bank = z.float().double(), torch.arange(0, 60, 2, device=device)
    wide, narrow = (sampled(make(fix), part, labels, bank).at(part, labels).blocks for part in (z, z.float()))
    for what in ("dense", "diagonal", "total"):
        theirs, ours = getattr(wide, what)(), getattr(narrow, what)()
        assert ours.dtype == torch.float32
        assert close(ours.double(), theirs, tolerance=1e-3)


def test_what_is_refused(device: str) -> None:
    z, labels = numbers(0, 6, 3).to(device), torch.arange(6, device=device) % 3
    everything = torch.arange(6, device=device)
    for fix in ("full", "positive", "ggn"):
        with pytest.raises(UnsupportedError, match=f"negative_samples.*{fix}.*Use pd_fix"):
            sampled(make(fix), z, labels, everything)
    with pytest.raises(InputError, match="the same data in every pass"):
        sampled(make(), z, labels, everything).at(z, labels + 1)
