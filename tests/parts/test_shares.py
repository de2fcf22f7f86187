"""Which points a part has: numbers, padding, and whether two parts have the same ones."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import refused
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import contrastive_curvature as cc
from contrastive_curvature.fit.part_state import Origin
from contrastive_curvature.fit.passes import PassRecord
from contrastive_curvature.fit.share import Share


def dataset(n: int, device: str) -> TensorDataset:
    return TensorDataset(torch.arange(n, device=device), torch.arange(n, device=device) % 3)


def read(loader: Any) -> tuple[list[int], list[int]]:
    """The points that a share gives, and the numbers that it has for them."""
    points: list[int] = []
    numbers: list[int] = []
    for (x, y), found in Share(loader):
        assert len(x) == len(y) == len(found) > 0
        points += x.tolist()
        numbers += found.tolist()
    return points, numbers


@given(n=st.integers(1, 40), world=st.integers(1, 6), size=st.integers(1, 9), shuffle=st.booleans(), drop=st.booleans())
def test_every_point_comes_once(n: int, world: int, size: int, shuffle: bool, drop: bool, device: str) -> None:
    points = dataset(n, device)
    found: list[int] = []
    for rank in range(world):
        sampler = DistributedSampler(points, world, rank, shuffle=shuffle, seed=4, drop_last=drop)
        mine, numbers = read(DataLoader(points, size, sampler=sampler))
        assert mine == numbers
        found += mine
    assert len(set(found)) == len(found) == (n // world * world if drop else n)


def test_batch_samplers_keep_the_order_or_say_nothing_of_padding(device: str) -> None:
    class Turned(BatchSampler):
        def __iter__(self) -> Any:
            return reversed(list(super().__iter__()))

    def loader(n: int, kind: type[BatchSampler], **more: Any) -> Any:
        points = dataset(n, device)
        sampler = DistributedSampler(points, 2, 1, shuffle=False, **more)
        return DataLoader(points, batch_sampler=kind(sampler, 2, drop_last=False))

    assert read(loader(5, BatchSampler)) == ([1, 3], [1, 3])
    with pytest.raises(cc.UnsupportedError, match=r"5 points are no multiple of 2 processes.*which ones"):
        Share(loader(5, Turned))
    # Without padding all points count, and have no numbers of the data set.
    assert read(loader(6, Turned))[0] == [5, 1, 3]
    assert read(loader(5, Turned, drop_last=True))[0] == [1, 3]


def test_more_rows_than_points_of_the_sampler_are_refused(device: str) -> None:
    points = dataset(6, device)

    def twice(rows: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.stack([row[0] for row in rows] * 2), torch.stack([row[1] for row in rows] * 2)

    loader = DataLoader(points, 3, sampler=DistributedSampler(points, 2, 0), collate_fn=twice)
    refused(lambda: read(loader), "train_loader: expected the 3 points of its sampler, got 6 or more")


def test_shards_of_accelerate(device: str) -> None:
    class Shards(DataLoader):
        num_processes = 1

    Shards.__module__ = "accelerate.data_loader"
    points = dataset(4, device)
    assert read(Shards(points, 2))[0] == [0, 1, 2, 3]
    Shards.num_processes = 2
    with pytest.raises(cc.UnsupportedError, match=r"Shards does not say which points only fill up a batch"):
        Share(Shards(points, 2))


def origin(z: Tensor, labels: Tensor, size: int) -> Origin:
    record = PassRecord()
    for rows, some in zip(z.split(size), labels.split(size), strict=True):
        record.add(rows, some)
    return record.origin()


@given(n=st.integers(2, 300), size=st.integers(1, 64), seed=st.integers(0, 99))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_copy_is_told_from_another_share(n: int, size: int, dtype: torch.dtype, seed: int, device: str) -> None:
    """In any order, and rounded differently; the other share has the same labels."""
    random = torch.Generator().manual_seed(seed)
    z, other = torch.randn(2, n, 8, generator=random, dtype=dtype).to(device)
    labels, order = torch.arange(n, device=device) % 3, torch.randperm(n, generator=random)
    noise = 1 + torch.finfo(dtype).eps * torch.randn(n, 8, generator=random, dtype=dtype).to(device)
    mine = origin(z, labels, 50)
    assert mine.same_points(origin((z * noise)[order], labels[order], size))
    assert not mine.same_points(origin(other, labels, 50))
    assert not mine.same_points(origin(z, labels + 1, 50))


def test_large_shares_differ_in_their_outermost_points(device: str) -> None:
    """Their sums agree: relative to the number n of points they vary as 1 / sqrt(n)."""
    n = 2**19
    z = (3 + torch.randn(2 * n, 2, generator=torch.Generator().manual_seed(0))).to(device)
    labels = torch.zeros(n, dtype=torch.int64, device=device)
    first, second = origin(z[:n], labels, n), origin(z[n:], labels, n)
    assert first.same(second)
    assert not first.same_points(second)
    assert first.same_points(origin(z[:n].flip(0), labels, n // 4))
