"""Losses of pairs whose negatives come from a bank: in blocks of any size, and however its points arrive again."""

import pytest
import torch
from loss_cases import numbers
from strategies import close
from tables import covering
from torch import Tensor

import contrastive_curvature as cc
from contrastive_curvature.errors import InputError, UnsupportedError
from contrastive_curvature.hessian.blocks import Blocks
from contrastive_curvature.losses import over_dataset as dataset
from contrastive_curvature.losses import pair_derivatives
from contrastive_curvature.losses.class_table import ClassTable
from contrastive_curvature.losses.over_dataset import DatasetHessian, dataset_hessian
from contrastive_curvature.pairs.rows import Rows


def make(fix: str = "fixed") -> cc.LogisticLoss:
    return cc.LogisticLoss(4.0, -1.0, 0.3, "type", pd_fix=fix)


def sampled(loss: cc.LogisticLoss, z: Tensor, labels: Tensor, bank: Tensor) -> DatasetHessian:
    """The Hessian of a data set with a bank."""
    every = Rows(None, torch.arange(len(z)), {"outputs": z, "targets": labels})
    kept = Rows(None, bank.cpu(), {"outputs": z[bank], "targets": labels[bank]})
    return dataset_hessian(loss, ClassTable.of(z, labels), None, every, kept, z.dtype)


def at(hessian: DatasetHessian, z: Tensor, labels: Tensor, rows: Tensor | None = None) -> Blocks:
    """The blocks of some points."""
    rows = torch.arange(len(z), device=z.device) if rows is None else rows
    return hessian.at(z[rows], labels[rows], rows.cpu()).blocks


def test_blocks_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """One pair at a time, nothing kept, one class at a time; batches and order of the points are of no effect."""
    z, labels = numbers(0, 23, 3).to(device), (torch.arange(23, device=device) ** 2) % 7
    bank = torch.randperm(23, generator=torch.Generator().manual_seed(1))[:9].to(device)
    found = sampled(make(), z, labels, bank)
    dense, diagonal = (getattr(at(found, z, labels), what)() for what in ("dense", "diagonal"))
    for module, name, size in ((pair_derivatives, "_HELD", 0), (dataset, "_PAIRS", 64), (dataset, "_TOGETHER", 4)):
        monkeypatch.setattr(module, name, size)
    again = sampled(make(), z, labels, bank)
    for rows in torch.randperm(23, generator=torch.Generator().manual_seed(2)).to(device).split(8):
        blocks = at(again, z, labels, rows)
        assert close(blocks.dense(), dense[rows], tolerance=1e-13)
        assert close(blocks.diagonal(), diagonal[rows], tolerance=1e-12)
        assert close(blocks[2:5].diagonal(), diagonal[rows][2:5], tolerance=1e-12)


def test_equal_points_are_told_apart_from_themselves(device: str) -> None:
    """Each is left out once, whichever of the two it is taken for."""
    z, labels = numbers(0, 8, 3).to(device), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2], device=device)
    z[1], z[4], z[5] = z[0], z[3], z[2]
    found = at(sampled(make(), z, labels, torch.arange(8, device=device)), z, labels)
    assert close(found.dense(), make().output_hessian(z, labels).blocks.dense())


def test_points_that_arrive_rounded_in_another_way_are_recognised(device: str) -> None:
    """Their blocks move as little as they do."""
    z, labels = numbers(0, 14, 3).to(device), torch.arange(14, device=device) % 3
    found = sampled(make(), z, labels, torch.arange(0, 14, 2, device=device))
    moved = z * (1 + 1e-9 * numbers(1, 14, 3).to(device))
    rows = torch.arange(13, -1, -1, device=device)
    assert close(at(found, moved, labels, rows).dense(), at(found, z, labels).dense()[rows], tolerance=1e-7)


@covering(1, fix=["fixed", "psd", "psd_parts", "ggn_fixed"])
def test_single_precision(fix: str, device: str) -> None:
    """In the dtype of the outputs, within 1e-3 of double precision."""
    z, labels = numbers(7, 60, 8).to(device), torch.arange(60, device=device) % 7
    z += 3 * numbers(8, 7, 8).to(device)[labels]
    # Outputs of the same value in both.
    z, bank = z.float().double(), torch.arange(0, 60, 2, device=device)
    wide, narrow = (at(sampled(make(fix), part, labels, bank), part, labels) for part in (z, z.float()))
    for what in ("dense", "diagonal", "total"):
        theirs, ours = getattr(wide, what)(), getattr(narrow, what)()
        assert ours.dtype == torch.float32
        assert close(ours.double(), theirs, tolerance=1e-3)


def test_what_is_refused(device: str) -> None:
    z, labels = numbers(0, 6, 3).to(device), torch.arange(6, device=device) % 3
    everything = torch.arange(6, device=device)
    for fix in ("full", "positive", "ggn"):
        with pytest.raises(UnsupportedError, match=f"negative_samples.*{fix}.*Use pd_fix"):
            at(sampled(make(fix), z, labels, everything), z, labels)
    with pytest.raises(InputError, match="the same data in every pass"):
        at(sampled(make(), z, labels, everything), z, labels + 1)
    # By their numbers these would be other points of the same labels.
    with pytest.raises(InputError, match=r"the same order.*Turn shuffling off"):
        at(sampled(make(), z, labels, everything), z.flip(0), labels)
