"""The one rule for the order of a loader, and what is said of points that it leaves out or repeats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from contrastive_curvature.errors import InputError
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


class Turned(Sampler[int]):
    """Another order in every reading."""

    def __init__(self) -> None:
        self.readings = 0

    def __iter__(self) -> Iterator[int]:
        self.readings += 1
        return iter([(k + self.readings) % 7 for k in range(7)])

    def __len__(self) -> int:
        return 7


def test_others_stay_as_they_are() -> None:
    class Reversed(DataLoader[Any]):
        def __iter__(self) -> Any:
            return reversed(list(super().__iter__()))

    for loader in (
        [(torch.zeros(2, 1), torch.zeros(2))],
        DataLoader(DATA, batch_size=2),
        DataLoader(Stream(), batch_size=2),
        DataLoader(DATA, 2, sampler=DistributedSampler(DATA, 1, 0)),
        Reversed(DATA, batch_size=2, shuffle=True),
    ):
        assert in_fixed_order(loader) is loader


def test_a_loss_within_batches_reads_one_random_order_with_the_positions_of_the_data_set() -> None:
    sampler = SubsetRandomSampler([6, 5, 4, 3, 2, 1, 0])
    cases: list[tuple[Any, list[int]]] = [
        (DataLoader(DATA, 3, shuffle=True), [3, 3, 1]),
        (Own(DATA, 3, sampler=sampler), [3, 3, 1]),
        (DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, drop_last=False)), [4, 3]),
    ]
    for loader, sizes in cases:
        made, again = (in_fixed_order(loader, mixed=True, positions=True) for _ in range(2))
        first, *others = passes(made)
        assert sorted(first) == list(range(7)) != first
        assert others == [first, first]
        assert passes(again)[0] == first
        assert [len(x) for x, _ in made] == sizes
        positions = made.numbers.tolist()
        assert first == ([6 - k for k in positions] if loader.sampler is sampler else positions)


# How many of the seven points are read, and how many of them again.
SAMPLERS: list[tuple[dict[str, Any], int, int]] = [
    ({"sampler": [0, 0, 1, 1, 1, 2]}, 3, 2),
    ({"batch_sampler": [[0, 1, 2], [2, 1, 4]]}, 4, 2),
    ({"sampler": RandomSampler(DATA, num_samples=3)}, 3, 0),
    ({"drop_last": True}, 6, 0),
]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("given_to", "read", "again"), SAMPLERS)
def test_points_that_are_left_out_or_repeated_are_told(
    given_to: dict[str, Any], read: int, again: int, mixed: bool
) -> None:
    loader = DataLoader(DATA, **{"batch_size": 1 if "batch_sampler" in given_to else 3, **given_to})
    with pytest.warns(UserWarning, match=f"^train_loader: {read} of the 7 points of its data set are read") as told:
        made = in_fixed_order(loader, mixed=mixed)
    (message,) = [str(record.message) for record in told]
    assert (f", {again} of them more than once" in message) == bool(again)
    first, *others = passes(made)
    assert others == [first, first]
    assert len(set(first)) == read


@pytest.mark.filterwarnings("error")
def test_no_word_of_loaders_that_give_every_point_once_or_a_subset_that_was_asked_for() -> None:
    for mixed in (False, True):
        for more in ({}, {"shuffle": True}, {"sampler": SubsetRandomSampler([1, 2])}, {"sampler": Turned()}):
            in_fixed_order(DataLoader(DATA, 2, **more), mixed=mixed)  # type: ignore[arg-type]
        in_fixed_order(DataLoader(DATA, 7, drop_last=True, shuffle=True), mixed=mixed)
    # No smaller batch is needed for the pairs of a whole data set, and nothing is left out.
    assert passes(in_fixed_order(DataLoader(DATA, 4, drop_last=True, shuffle=True)))[0] == list(range(7))
    with pytest.warns(UserWarning, match="4 of the 7 points"):
        made = in_fixed_order(DataLoader(DATA, 4, drop_last=True, shuffle=True), mixed=True)
    assert len(made) == 1


def test_a_sampler_whose_points_cannot_be_found_again_is_refused() -> None:
    for sampler in (Turned(), RandomSampler(DATA, num_samples=3), WeightedRandomSampler([1.0] * 7, 20)):
        with pytest.raises(InputError, match="queries: expected the same batches in every reading"):
            in_fixed_order(DataLoader(DATA, 2, sampler=sampler), "queries", positions=True)
    by_length = DataLoader(DATA, 2, sampler=[2, 1, 0, 3, 4, 5, 6])  # type: ignore[arg-type]
    assert passes(in_fixed_order(by_length, positions=True))[0] == [2, 1, 0, 3, 4, 5, 6]
