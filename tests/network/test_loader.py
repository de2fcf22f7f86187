"""Loaders that shuffle, in the order of their data set; the others as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laplace import Laplace
from strategies import build_network, close, make_inputs
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import contrastive_curvature as cc
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


@pytest.mark.parametrize(
    "loader",
    [
        [(torch.zeros(2, 1), torch.zeros(2))],
        DataLoader(DATA, batch_size=2),
        DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 2, False), num_workers=0),
        DataLoader(DATA, batch_size=2, sampler=RandomSampler(DATA, replacement=True)),
        DataLoader(DATA, batch_size=2, sampler=RandomSampler(DATA, num_samples=3)),
        DataLoader(DATA, batch_size=2, sampler=WeightedRandomSampler([1.0] * 7, 7)),
        DataLoader(DATA, batch_size=2, shuffle=True, drop_last=True),
        DataLoader(Stream(), batch_size=2),
        Own(DATA, batch_size=2, shuffle=True),
    ],
    ids=lambda loader: type(loader).__name__,
)
def test_others_stay_as_they_are(loader: Any) -> None:
    if isinstance(loader, DataLoader) and type(getattr(loader, "batch_sampler", None)) is BatchSampler:
        plain = type(loader.sampler) is RandomSampler and not loader.drop_last and type(loader) is DataLoader
        if plain and not loader.sampler.replacement and loader.sampler.num_samples == 7:
            # The batch sampler that DataLoader itself makes cannot be told from an equal one of the user's.
            assert type(in_fixed_order(loader).sampler) is SequentialSampler
            return
    assert in_fixed_order(loader) is loader


def test_settings_are_kept() -> None:
    def start(_: int) -> None: ...

    generator = torch.Generator()
    loader = DataLoader(
        DATA,
        batch_size=3,
        shuffle=True,
        num_workers=2,
        timeout=60,
        worker_init_fn=start,
        generator=generator,
        prefetch_factor=3,
        persistent_workers=True,
    )
    made = in_fixed_order(loader)
    assert made is not loader
    names = ("dataset", "batch_size", "num_workers", "collate_fn", "timeout", "worker_init_fn", "generator")
    for name in (*names, "prefetch_factor", "persistent_workers", "pin_memory", "drop_last"):
        assert getattr(made, name) == getattr(loader, name), name


def test_low_rank_takes_a_shuffling_loader() -> None:
    torch.manual_seed(0)
    model, x, y = build_network("tanh", 2), make_inputs("tanh", 6), torch.tensor([0, 0, 1, 1, 2, 2])
    fitted = []
    for shuffle in (True, False):
        la = Laplace(model, "contrastive", "all", "lowrank", backend_kwargs={"pd_fix": "positive", "rank": 3})
        la.fit(DataLoader(TensorDataset(x, y), batch_size=4, shuffle=shuffle))
        fitted.append(la(x).covariance)
        backend = cc.ContrastiveGGN(model)
        v = torch.ones(la.n_params, dtype=x.dtype)
        fitted.append(backend.matvec(DataLoader(TensorDataset(x, y), batch_size=4, shuffle=shuffle), v))
    assert close(fitted[0], fitted[2])
    assert torch.equal(fitted[1], fitted[3])
