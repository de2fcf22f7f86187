"""The draw of the points that stand for all: the same for any division, uniform, and nested."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import refused

from contrastive_curvature.pairs.rows import RowCollector, Rows, content_numbers, point_keys


def collected(numbers: torch.Tensor, size: int | None, sizes: list[int], seed: int, device: str) -> Rows:
    """From batches of some sizes, the last of all that remain."""
    collector = RowCollector(size, seed)
    for part in numbers.split([*sizes, len(numbers) - sum(sizes)]):
        collector.add(part, {"value": 3.0 * part.to(device), "row": part.unsqueeze(1).expand(-1, 2).to(device)})
    return collector.rows()


@st.composite
def divisions(draw: st.DrawFn) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Different numbers, and a division of them into parts of batches in any order."""
    found = draw(st.lists(st.integers(0, 2**45), min_size=1, max_size=60, unique=True))
    numbers = torch.tensor(found)
    shuffled = torch.tensor(draw(st.permutations(found)))
    cuts = sorted(draw(st.lists(st.integers(0, len(found)), max_size=6)))
    parts = list(shuffled.tensor_split(cuts))
    return numbers, [list(part.split(draw(st.integers(1, 7)))) for part in parts]


@given(drawn=divisions(), size=st.integers(1, 70), seed=st.integers(0, 5))
def test_the_sample_is_that_of_any_other_division(drawn, size, seed, device) -> None:
    numbers, parts = drawn
    # The definition: the points with the smallest keys.
    wanted = numbers[point_keys(numbers, seed).argsort()[:size]].sort().values
    merged = RowCollector(size, seed).rows()
    for batches in parts:
        collector = RowCollector(size, seed)
        for batch in batches:
            collector.add(batch, {"value": 3.0 * batch.to(device)})
        merged = merged.merged(collector.rows())
    found = merged.in_order()
    assert torch.equal(found.numbers, wanted)
    assert torch.equal(found.columns["value"].cpu(), 3.0 * wanted)
    assert found.columns["value"].device.type == device


@given(seed=st.integers(0, 99), n=st.integers(1, 300), kinds=st.integers(1, 90), size=st.integers(1, 60))
def test_points_that_repeat_do_not_fill_a_sample_and_divisions_agree(seed, n, kinds, size, device) -> None:
    """Numbers by content: one in twenty rows is of one number, and more only for want of others."""
    numbers = (kinds * torch.rand(n, generator=torch.Generator().manual_seed(seed)).square()).to(torch.int64)
    batches = numbers.split(1 + seed)
    merged, at_once = RowCollector(size).rows(), max(1, size // 20)
    for part in (batches[: len(batches) // 3], batches[len(batches) // 3 :]):
        collector = RowCollector(size)
        for batch in part:
            collector.add(batch, {"value": 3.0 * batch.to(device)})
        merged = merged.merged(collector.rows())
    turns, waiting = [], numbers.unique().tolist()
    left = {number: int((numbers == number).sum()) for number in waiting}
    waiting.sort(key=lambda number: int(point_keys(torch.tensor([number]))[0]))
    while any(left.values()):
        for number in waiting:
            turns += [number] * min(at_once, left[number])
            left[number] -= min(at_once, left[number])
    assert sorted(merged.numbers.tolist()) == sorted(turns[:size] if len(turns) > size else turns)
    assert torch.equal(merged.columns["value"].cpu(), 3.0 * merged.numbers)


def test_numbers_by_content_withstand_rounding_and_tell_inputs_of_a_tight_class_apart(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(1, 16, generator=generator) + 0.01 * torch.randn(10_000, 16, generator=generator)
    numbers, mixed = content_numbers(z.to(device)), torch.randperm(len(z), generator=generator)
    assert (numbers.dtype, numbers.device.type) == (torch.int64, device)
    assert torch.equal(torch.cat([content_numbers(part.to(device)) for part in z[mixed].split(77)]), numbers[mixed])
    assert len(numbers.unique()) > 0.99 * len(z)
    rounded = z * (1 + 1e-6 * torch.randn(z.shape, generator=generator))
    assert (content_numbers(rounded.to(device)) == numbers).double().mean() > 0.99
    # Of unit norm, whose logarithm is rounding, as of any other.
    units = z / z.norm(dim=1, keepdim=True)
    assert (content_numbers(units.to(device)) == content_numbers(units.double().to(device))).double().mean() > 0.99
    assert not (content_numbers(1.1 * z.to(device)) == numbers).any()


@given(n=st.integers(1, 50), size=st.integers(1, 60), fewer=st.integers(1, 60), seed=st.integers(0, 3))
def test_samples_are_nested(n: int, size: int, fewer: int, seed: int, device: str) -> None:
    numbers = torch.arange(n)
    fewer = min(fewer, size)
    large, small = (collected(numbers, m, [], seed, device).in_order() for m in (size, fewer))
    assert torch.equal(large.subsample(fewer).in_order().numbers, small.numbers)
    assert set(small.numbers.tolist()) <= set(large.numbers.tolist())
    everything = collected(numbers, None, [], seed, device)
    assert torch.equal(everything.subsample(fewer).in_order().numbers, small.numbers)


@given(numbers=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=50, unique=True), seed=st.integers(0, 9))
def test_different_points_have_different_keys(numbers: list[int], seed: int, device: str) -> None:
    keys = point_keys(torch.tensor(numbers, device=device), seed)
    assert keys.device.type == "cpu"
    assert len(keys.unique()) == len(numbers)
    # SplitMix64 in Python's whole numbers.
    x = (numbers[0] + (2 * seed + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    x ^= x >> 31
    assert int(keys[0]) % 2**64 == x


def test_rows_of_other_shapes_are_refused_by_name(device: str) -> None:
    collector = RowCollector(10)
    for length in (4, 5):
        collector.add(torch.arange(2) + 2 * length, {"input/tokens": torch.zeros(2, length, device=device)})
    refused(lambda: collector.rows(), "loader: input/tokens: expected one shape for every point, (4,)")
    parts = [Rows(None, torch.tensor([k]), {"x": torch.zeros(1, 2 + k, device=device)}) for k in range(2)]
    refused(lambda: parts[0].merged(parts[1]), "loader: x: expected one shape")


def test_nothing_merges_with_everything(device: str) -> None:
    nothing, some = RowCollector(3).rows(), collected(torch.arange(5), 3, [2], 0, device)
    assert nothing.merged(some) is some
    assert some.merged(nothing) is some
