"""Loaders that shuffle, in the order of their data set; the others as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from contrastive_curvature.network.loader import in_fixed_order

DATA = TensorDataset(torch.arange(7.0), torch.arange(7))


def passes(loader: Any) -> list[list[int]]:
    return [[int(x) for batch in loader for x in batch[0]] for _ in range(3)]


@given(
    batch=st.integers(1, 9), size=st.integers(1, 9), subset=st.booleans(), workers=st.sampled_from((False, False, True))
)
def test_a_shuffling_loader_gives_its_data_in_order(batch: int, size: int, subset: bool, workers: bool) -> None:
    data = TensorDataset(torch.arange(size), torch.arange(size))
    kept = list(range(0, size, 2))

    def collate(points: list[Any]) -> list[Tensor]:
        return [torch.stack([p[0] for p in points]) + 10]

    order: dict[str, Any] = {"sampler": SubsetRandomSampler(kept)} if subset else {"shuffle": True}
    made = in_fixed_order(DataLoader(data, batch_size=batch, collate_fn=collate, pin_memory=False, **order))
    wanted = [i + 10 for i in (kept if subset else range(size))]
    assert passes(made) == [wanted] * 3
    assert {len(x[0]) for x in made} <= {batch, len(wanted) % batch, len(wanted)}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(()), torch.zeros(()))])


class Own(DataLoader[Any]):
    pass


def test_others_stay_as_they_are() -> None:
    for loader in (
        [(torch.zeros(2, 1), torch.zeros(2))],
        DataLoader(DATA, batch_size=2),
        DataLoader(DATA, batch_size=2, sampler=RandomSampler(DATA, replacement=True)),
        DataLoader(DATA, batch_size=2, sampler=RandomSampler(DATA, num_samples=3)),
        DataLoader(DATA, batch_size=2, sampler=WeightedRandomSampler([1.0] * 7, 7)),
        DataLoader(DATA, batch_size=2, shuffle=True, drop_last=True),
        DataLoader(Stream(), batch_size=2),
        Own(DATA, batch_size=2, shuffle=True),
    ):
        assert in_fixed_order(loader) is loader
